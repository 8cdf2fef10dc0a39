"""Chats' responses: reasoning, content and calls, each in fields of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypedDict

from msgspec import UNSET, UnsetType, structs

from trueline.outputs import CompletionOutput, Logprobs, RequestOutput
from trueline.server.protocol.call_deltas import call_delta, called_tools, malformed_calls
from trueline.server.protocol.logprobs import chat_logprobs
from trueline.server.protocol.requests import ChatRequest
from trueline.server.protocol.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionTokensDetails,
    FunctionDelta,
    ToolCallDelta,
    Usage,
)
from trueline.server.protocol.stream_chunks import (
    BLANK,
    Delta,
    PromptFields,
    Sent,
    Writer,
    cut_at_blanks,
    encode,
    event,
)

NO_DELTA: Delta[ChatLogprobs] = Delta("", "", None, UNSET, None, None)


class ChatWriter(Writer[ChatChunkChoice, ChatLogprobs]):
    _request: ChatRequest

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """ApiError where a sequence failed."""
        self._settle(outputs)
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            sent = Sent(completion.index)
            new = self._new_since(sent, self._shown(completion))
            calls = called_tools(completion)
            message = ChatMessage(
                content=new.text or (None if calls else ""),
                tool_calls=calls or UNSET,
                malformed_tool_calls=malformed_calls(completion.malformed) or UNSET,
                **_named(new.reasoning),
            )
            choices.append(
                ChatChoice(
                    index=sent.index,
                    message=message,
                    logprobs=new.logprobs,
                    finish_reason=new.finish_reason,
                    stop_reason=new.stop_reason,
                    token_ids=new.token_ids,
                )
            )
        fields = self._prompt_fields(output)
        return encode(ChatCompletion(**self._names, choices=choices, usage=self._usage(), **fields))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt: PromptFields | None = None,
    ) -> ChatChunk:
        return ChatChunk(**self._names, choices=choices, usage=usage, **(prompt or {}))

    def _templates(self, sent: Sent) -> dict[str, list[bytes]]:
        def cut(delta: ChatDelta, blanks: int = 1) -> list[bytes]:
            return cut_at_blanks(
                self._chunk([_chunk_choice(sent, delta)], self._chunk_usage()), blanks
            )

        reasoning = ChatDelta(**_named(BLANK))
        return {"text": cut(ChatDelta(content=BLANK)), "reasoning": cut(reasoning, 2)}

    def _plain_delta(self, sent: Sent, completion: CompletionOutput) -> Iterator[bytes]:
        if reasoning := completion.reasoning[sent.reasoning :]:
            sent.reasoning += len(reasoning)
            yield encode(reasoning).join(sent.templates["reasoning"])
        yield from super()._plain_delta(sent, completion)
        if completion.calls or completion.malformed:
            yield from self._plain_calls(sent, completion)

    def _plain_calls(self, sent: Sent, completion: CompletionOutput) -> Iterator[bytes]:
        for piece in sent.calls.pieces(completion):
            if piece.begins:
                yield self._calls_chunk(sent, ChatDelta(tool_calls=[call_delta(piece)]))
                continue
            name = f"call {piece.place}"
            if name not in sent.templates:
                blank = ToolCallDelta(index=piece.place, function=FunctionDelta(arguments=BLANK))
                chunk = self._chunk(
                    [_chunk_choice(sent, ChatDelta(tool_calls=[blank]))], self._chunk_usage()
                )
                sent.templates[name] = cut_at_blanks(chunk)
            yield encode(piece.arguments).join(sent.templates[name])
        if malformed := malformed_calls(sent.calls.malformed(completion)):
            yield self._calls_chunk(sent, ChatDelta(malformed_tool_calls=malformed))

    def _calls_chunk(self, sent: Sent, delta: ChatDelta) -> bytes:
        return event(self._chunk([_chunk_choice(sent, delta)], self._chunk_usage()))

    def _shown(self, completion: CompletionOutput) -> CompletionOutput:
        shows = self._request.include_reasoning or not completion.reasoning
        return completion if shows else replace(completion, reasoning="")

    def _details(
        self, completions: Sequence[CompletionOutput]
    ) -> CompletionTokensDetails | UnsetType:
        return CompletionTokensDetails(sum(each.num_reasoning_tokens for each in completions))

    def _rich_delta(
        self, sent: Sent, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[bytes]:
        if not sent.started:
            role = _chunk_choice(sent, ChatDelta(role="assistant", content=""))
            # what is said of the prompt is said once
            is_first = not any(sent.started for sent in self._sent.values())
            fields = self._prompt_fields(output) if is_first else None
            yield event(self._chunk([role], self._chunk_usage(), fields))
        new = self._new_since(sent, completion)
        calls = [call_delta(piece) for piece in sent.calls.pieces(completion)]
        malformed = malformed_calls(sent.calls.malformed(completion))
        says = (new.text, new.reasoning, calls, malformed)
        if not any((*says, new.finish_reason, new.token_ids, new.logprobs)):
            return
        # a call a chunk, and the end behind them: clients take a call for done by what follows it
        deltas = [ChatDelta(tool_calls=[call]) for call in calls]
        if new.finish_reason or not deltas:
            deltas.append(ChatDelta())
        last = len(deltas) - 1
        deltas[0] = structs.replace(deltas[0], content=new.text or UNSET, **_named(new.reasoning))
        deltas[last] = structs.replace(deltas[last], malformed_tool_calls=malformed or UNSET)
        for place, delta in enumerate(deltas):
            told = new if place == 0 else NO_DELTA
            ends = new if place == last else NO_DELTA
            told = told._replace(finish_reason=ends.finish_reason, stop_reason=ends.stop_reason)
            yield event(self._chunk([_chunk_choice(sent, delta, told)], self._chunk_usage()))

    def _logprobs(self, sent: Sent, ids: list[int], logprobs: Logprobs) -> ChatLogprobs:
        assert self._request.logprobs is not None
        return chat_logprobs(self._token_names, ids, logprobs, self._request.logprobs)


class _Reasoning(TypedDict, total=False):
    reasoning: str
    reasoning_content: str


def _named(reasoning: str) -> _Reasoning:
    """Under both of its names."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _chunk_choice(
    sent: Sent, delta: ChatDelta, new: Delta[ChatLogprobs] = NO_DELTA
) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=sent.index,
        delta=delta,
        logprobs=new.logprobs,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        token_ids=new.token_ids,
    )
