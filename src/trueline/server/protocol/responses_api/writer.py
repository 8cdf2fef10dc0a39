"""A response as bytes: the whole, or the events of a stream, which make up the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from trueline.outputs import CompletionOutput, RequestOutput
from trueline.server.protocol.call_deltas import malformed_calls
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.failure import failure
from trueline.server.protocol.forms import TextFormat
from trueline.server.protocol.logprobs import TokenNames, token_logprobs
from trueline.server.protocol.parts import PartPiece, PartProgress
from trueline.server.protocol.raw_json import in_pieces
from trueline.server.protocol.responses import TokenLogprob
from trueline.server.protocol.responses_api import events
from trueline.server.protocol.responses_api.bodies import (
    ReasoningOptions,
    TextOptions,
)
from trueline.server.protocol.responses_api.objects import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    Status,
)
from trueline.server.protocol.responses_api.request import ResponsesRequest
from trueline.server.protocol.sse import named_event
from trueline.server.protocol.stream_chunks import encode
from trueline.text.tokenizer import Tokenizer

Event = TypeVar("Event", bound=events.Numbered)
_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


class _Place(TypedDict):
    item_id: str
    output_index: int


class ResponsesWriter:
    def __init__(
        self, response_id: str, created: int, request: ResponsesRequest, tokenizer: Tokenizer
    ) -> None:
        self.response_id = response_id
        self._created, self._request = created, request
        self._token_names = TokenNames(tokenizer, as_ids=False)
        self._progress = PartProgress()
        self._output: list[OutputItem] = []
        """Those that are done."""
        self._said: list[str] = []
        """The pieces of the one that is not."""
        self._scores: list[TokenLogprob] = []
        self._number = 0
        self._ended = False

    def delta(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Events for what is new; the last one is that of the end, or of the failure."""
        (output,) = outputs
        if self._number == 0:
            for kind in (events.Created, events.InProgress):
                yield named_event(self._event(kind, response=self._response("in_progress")))
        yield from map(named_event, self._new(output))
        if self._ended or not output.finished:
            return
        self._ended = True
        if (error := failure(outputs)) is not None:
            yield self.failed(error)
            return
        response = self._whole(output)
        done = events.Completed if response.status == "completed" else events.Incomplete
        yield named_event(self._event(done, response=response))

    def failed(self, error: ApiError) -> bytes:
        told = ResponseFailure(error.code or "server_error", error.message)
        response = self._response("failed")
        response.error = told
        return named_event(self._event(events.Failed, response=response))

    def end(self) -> bytes:
        return b""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """ApiError where the sequence failed."""
        if (error := failure(outputs)) is not None:
            raise error
        (output,) = outputs
        for _ in self._new(output):
            pass
        return encode(self._whole(output))

    def weight(self, outputs: Sequence[RequestOutput]) -> int:
        """About how many tokens and logprobs the next events are made of; text alone is light. The
        first and the last repeat what was asked."""
        (completion,) = (each for output in outputs for each in output.outputs)
        repeats = self._request.num_bytes if self._number == 0 or completion.finished else 0
        if self._request.logprobs is None:
            return repeats
        new = len(completion.token_ids) - self._progress.num_tokens
        return repeats + new * (1 + self._request.logprobs)

    def _new(self, output: RequestOutput) -> Iterator[events.Numbered]:
        (completion,) = output.outputs
        for piece in self._progress.pieces(completion):
            if piece.begins:
                self._said, self._scores = [], []
                yield from self._begins(piece)
            scores = self._new_scores(piece, completion)
            if piece.text or scores:
                self._said.append(piece.text)
                self._scores += scores
                yield self._goes_on(piece, scores)
            if piece.ends:
                yield from self._ends(piece, _status(piece, completion))

    def _begins(self, piece: PartPiece) -> Iterator[events.Numbered]:
        item = self._item(piece, "in_progress", "", None)
        yield self._event(events.ItemAdded, output_index=piece.place, item=item)
        if (part := self._part(piece, "", [])) is not None:
            yield self._event(events.PartAdded, **self._place(piece), part=part)

    def _goes_on(self, piece: PartPiece, scores: list[TokenLogprob]) -> events.Numbered:
        place, text = self._place(piece), piece.text
        match piece.kind:
            case "content":
                shown = in_pieces(scores)
                return self._event(events.TextDelta, **place, delta=text, logprobs=shown)
            case "reasoning":
                return self._event(events.ReasoningDelta, **place, delta=text)
            case "call":
                return self._event(events.ArgumentsDelta, **place, delta=text)

    def _ends(self, piece: PartPiece, status: ItemStatus) -> Iterator[events.Numbered]:
        place, text, scores = self._place(piece), "".join(self._said), in_pieces(self._scores)
        if piece.call is not None:
            name = piece.call.name
            yield self._event(events.ArgumentsDone, **place, name=name, arguments=text)
        elif piece.kind == "content":
            yield self._event(events.TextDone, **place, text=text, logprobs=scores)
        else:
            yield self._event(events.ReasoningDone, **place, text=text)
        part = self._part(piece, text, scores)
        if part is not None:
            yield self._event(events.PartDone, **place, part=part)
        item = self._item(piece, status, text, part)
        self._output.append(item)
        yield self._event(events.ItemDone, output_index=piece.place, item=item)

    def _part(
        self, piece: PartPiece, text: str, scores: list[TokenLogprob]
    ) -> OutputText | ReasoningText | None:
        match piece.kind:
            case "content":
                return OutputText(text, [], scores)
            case "reasoning":
                return ReasoningText(text)
            case "call":
                return None

    def _item(
        self,
        piece: PartPiece,
        status: ItemStatus,
        text: str,
        part: OutputText | ReasoningText | None,
    ) -> OutputItem:
        name = self._place(piece)["item_id"]
        if piece.call is not None:
            call = piece.call
            return FunctionCallItem(
                id=name, status=status, call_id=call.id, name=call.name, arguments=text
            )
        if piece.kind == "content":
            said = [part] if isinstance(part, OutputText) else []
            return OutputMessage(id=name, status=status, content=said)
        thought = [part] if isinstance(part, ReasoningText) else []
        return ReasoningItem(id=name, status=status, summary=[], content=thought)

    def _place(self, piece: PartPiece) -> _Place:
        own = self.response_id.removeprefix("resp_")
        return {
            "item_id": f"{_PREFIXES[piece.kind]}_{own}_{piece.place}",
            "output_index": piece.place,
        }

    def _new_scores(self, piece: PartPiece, completion: CompletionOutput) -> list[TokenLogprob]:
        count, logprobs = self._request.logprobs, completion.logprobs
        if piece.kind != "content" or count is None or logprobs is None:
            return []
        new = slice(piece.tokens.start, piece.tokens.stop)
        return token_logprobs(self._token_names, completion.token_ids[new], logprobs[new], count)

    def _event(self, kind: type[Event], **fields: object) -> Event:
        event = kind(sequence_number=self._number, **fields)
        self._number += 1
        return event

    def _whole(self, output: RequestOutput) -> ResponseObject:
        (completion,) = output.outputs
        cut = completion.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.malformed_tool_calls = malformed_calls(completion.malformed) or UNSET
        given, new = len(output.prompt_token_ids), len(completion.token_ids)
        response.usage = ResponseUsage(
            input_tokens=given,
            input_tokens_details=InputTokensDetails(output.num_cached_tokens, 0),
            output_tokens=new,
            output_tokens_details=OutputTokensDetails(completion.num_reasoning_tokens),
            total_tokens=given + new,
        )
        return response

    def _response(self, status: Status) -> ResponseObject:
        """With the items that are done."""
        fields, params = self._request.fields, self._request.params
        text = fields.text or TextOptions()
        return ResponseObject(
            id=self.response_id,
            created_at=self._created,
            status=status,
            model=self._request.model,
            output=[*self._output],
            usage=None,
            error=None,
            incomplete_details=None,
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            tools=fields.tools or [],
            tool_choice=fields.tool_choice or "auto",
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            text=text if text.format else replace(text, format=TextFormat()),
            reasoning=fields.reasoning or ReasoningOptions(),
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=self._request.logprobs or 0,
            metadata=fields.metadata or {},
            user=fields.user,
        )


def _status(piece: PartPiece, completion: CompletionOutput) -> ItemStatus:
    """Of an item that is done."""
    if piece.call is not None:
        return "completed" if piece.call.ended else "incomplete"
    is_last = piece.place == len(completion.parts) - 1
    return "incomplete" if is_last and completion.finish_reason == "length" else "completed"
