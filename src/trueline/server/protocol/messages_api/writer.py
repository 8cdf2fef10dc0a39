"""A message as bytes: the whole, or the events of a stream, which make up the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from trueline.outputs import CompletionOutput, RequestOutput
from trueline.server.protocol.call_deltas import has_calls, malformed_calls
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.failure import failure
from trueline.server.protocol.messages_api.objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputPiece,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    TextBlock,
    TextPiece,
    ThinkingBlock,
    ThinkingPiece,
    ThinkingTokens,
    ToolUseBlock,
    message_error,
)
from trueline.server.protocol.messages_api.request import MessagesRequest
from trueline.server.protocol.parts import PartPiece, PartProgress
from trueline.server.protocol.responses import MalformedToolCall
from trueline.server.protocol.sse import named_event
from trueline.server.protocol.stream_chunks import encode


class MessagesWriter:
    def __init__(self, response_id: str, request: MessagesRequest) -> None:
        self.response_id, self._request = response_id, request
        self._progress = PartProgress()
        self._started = self._ended = False

    def delta(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Events for what is new; the last one is that of the end, or the error."""
        (output,) = outputs
        (completion,) = output.outputs
        if not self._started:
            self._started = True
            yield named_event(MessageStart(self._message(output, 0)))
        for piece in self._progress.pieces(completion):
            yield from map(named_event, _events(piece))
        if self._ended or not output.finished:
            return
        self._ended = True
        if (error := failure(outputs)) is not None:
            yield self.failed(error)
            return
        reason, sequence = _stop(completion)
        end = MessageEnd(reason, sequence, _malformed(completion))
        yield named_event(MessageDelta(end, _usage(output, len(completion.token_ids))))
        yield named_event(MessageStop())

    def failed(self, error: ApiError) -> bytes:
        return named_event(message_error(error))

    def end(self) -> bytes:
        return b""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """ApiError where the sequence failed. Calls that cannot be made are left out."""
        if (error := failure(outputs)) is not None:
            raise error
        (output,) = outputs
        (completion,) = output.outputs
        message = self._message(output, len(completion.token_ids))
        for piece in self._progress.pieces(completion):
            if piece.call is None or piece.call.ended:
                message.content.append(_block(piece, piece.text))
        message.stop_reason, message.stop_sequence = _stop(completion)
        message.malformed_tool_calls = _malformed(completion)
        return encode(message)

    def weight(self, outputs: Sequence[RequestOutput]) -> int:
        """Text alone is light."""
        return 0

    def _message(self, output: RequestOutput, num_tokens: int) -> MessageObject:
        return MessageObject(
            id=self.response_id,
            model=self._request.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(output, num_tokens),
        )


def _events(piece: PartPiece) -> Iterator[MessageEvent]:
    if piece.begins:
        yield BlockStart(piece.place, _block(piece, ""))
    if piece.text:
        yield BlockDelta(piece.place, _delta(piece))
    if piece.ends:
        yield BlockStop(piece.place)


def _block(piece: PartPiece, text: str) -> Block:
    if piece.call is not None:
        arguments = msgspec.json.decode(text, type=dict) if text else {}
        return ToolUseBlock(piece.call.id, piece.call.name, arguments)
    return TextBlock(text) if piece.kind == "content" else ThinkingBlock(text)


def _delta(piece: PartPiece) -> TextPiece | ThinkingPiece | InputPiece:
    match piece.kind:
        case "call":
            return InputPiece(piece.text)
        case "content":
            return TextPiece(piece.text)
        case "reasoning":
            return ThinkingPiece(piece.text)


def _stop(completion: CompletionOutput) -> tuple[StopReason, str | None]:
    if completion.finish_reason == "length":
        return "max_tokens", None
    if isinstance(completion.stop_reason, str):
        return "stop_sequence", completion.stop_reason
    return ("tool_use" if has_calls(completion) else "end_turn"), None


def _malformed(completion: CompletionOutput) -> list[MalformedToolCall] | UnsetType:
    return malformed_calls(completion.malformed) or UNSET


def _usage(output: RequestOutput, num_tokens: int) -> MessageUsage:
    (completion,) = output.outputs
    return MessageUsage(
        input_tokens=len(output.prompt_token_ids) - output.num_cached_tokens,
        cache_read_input_tokens=output.num_cached_tokens,
        output_tokens=num_tokens,
        output_tokens_details=ThinkingTokens(completion.num_reasoning_tokens if num_tokens else 0),
    )
