"""Answers as bytes: the frames of a stream, or the whole. Both are made by the same lines from
what is new, so a stream, joined, is the whole.

Most frames differ from the one before in nothing but the text: these are a template cut in two,
and only the text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from trueline.outputs import CompletionOutput, Logprobs, RequestOutput
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.logprobs import (
    CompletionScores,
    chat_logprobs,
    joined,
    prompt_logprobs,
)
from trueline.server.protocol.pieces import in_pieces
from trueline.server.protocol.requests import ChatRequest, CompletionRequest, GenerateRequest
from trueline.server.protocol.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    Usage,
)
from trueline.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_BLANK = "\0"
_BLANK_JSON = _encode(_BLANK)


def failure(outputs: Sequence[RequestOutput]) -> ApiError | None:
    """The error of sequences that did not come to their end."""
    for copy in (copy for output in outputs for copy in output.outputs):
        if copy.finish_reason == "abort":
            return ApiError(503, copy.error or "the request was aborted", code="aborted")
        if copy.finish_reason == "error":
            return ApiError(500, copy.error or "the engine failed", code="engine_error")
    return None


class _Sent:
    """How much of one choice is out."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = self.tokens = 0
        self.started = self.finished = False
        self.head = self.tail = b""
        self.scores: CompletionScores | None = None


class _News(NamedTuple):
    text: str
    logprobs: Any
    token_ids: list[int] | UnsetType
    finish_reason: Any
    stop_reason: int | str | None


_NOTHING = _News("", None, UNSET, None, None)


class _Frames:
    def __init__(
        self,
        request_id: str,
        created: int,
        fingerprint: str,
        request: GenerateRequest,
        tokenizer: Tokenizer,
    ) -> None:
        self._names: dict[str, Any] = {
            "id": request_id,
            "created": created,
            "model": request.model,
            "system_fingerprint": fingerprint,
        }
        self._request, self._tokenizer = request, tokenizer
        self._sent: dict[int, _Sent] = {}
        self._outputs: Sequence[RequestOutput] = ()
        self._failed = False
        # every frame says something that the template does not
        self._is_rich = (
            request.logprobs is not None or request.return_token_ids or request.continuous_usage
        )

    def delta(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Frames for what is new. `outputs` are those of all prompts, in their order. Where a
        sequence failed, the last frame is the error."""
        self._outputs = outputs
        error = failure(outputs)
        for prompt, output in enumerate(outputs):
            if self._is_scored(output):
                for copy in output.outputs:
                    yield from self._copy_delta(prompt, output, self._shown(copy))
        if error is not None and not self._failed:
            self._failed = True
            yield error.frame()

    def weight(self, outputs: Sequence[RequestOutput]) -> int:
        """About how many tokens and logprobs the next frames are made of; text alone is light."""
        request, found = self._request, 0
        if not self._is_rich and request.scores_per_prompt_token is None and self._sent:
            return 0
        for prompt, output in enumerate(outputs):
            for copy in output.outputs:
                sent = self._sent.get(prompt * request.params.n + copy.index)
                if sent is None or not sent.started:
                    found += len(output.prompt_token_ids) * (request.scores_per_prompt_token or 1)
                tokens = len(copy.token_ids) - (0 if sent is None else sent.tokens)
                found += tokens * (1 + (request.logprobs or 0))
        return found

    def final_usage(self) -> bytes | None:
        """The last frame of a stream that is asked for usage: no choices."""
        if not self._request.include_usage:
            return None
        return _frame(self._chunk([], self._usage()))

    def _copy_delta(
        self, prompt: int, output: RequestOutput, copy: CompletionOutput
    ) -> Iterator[bytes]:
        index = prompt * self._request.params.n + copy.index
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = _Sent(index)
        if sent.started and not self._is_rich and copy.finish_reason is None:
            text = copy.text[sent.text :]
            if text:
                sent.text += len(text)
                yield sent.head + _encode(text) + sent.tail
        elif not sent.finished and (copy.token_ids or copy.finished):
            if not sent.started:
                sent.head, _, sent.tail = _frame(self._template(sent)).rpartition(_BLANK_JSON)
            yield from self._rich_delta(sent, output, copy)
            sent.started = True

    def _rich_delta(
        self, sent: _Sent, output: RequestOutput, copy: CompletionOutput
    ) -> Iterator[bytes]:
        raise NotImplementedError

    def _template(self, sent: _Sent) -> msgspec.Struct:
        raise NotImplementedError

    def _chunk(self, choices: list[Any], usage: Any, **more: Any) -> msgspec.Struct:
        raise NotImplementedError

    def _logprobs(self, sent: _Sent, ids: list[int], logprobs: Logprobs) -> Any:
        raise NotImplementedError

    def _take(self, sent: _Sent, copy: CompletionOutput) -> _News:
        """What is new of a copy, marked as sent."""
        ids = copy.token_ids[sent.tokens :]
        logprobs = None
        if ids and self._request.logprobs is not None and copy.logprobs is not None:
            logprobs = self._logprobs(sent, ids, copy.logprobs[sent.tokens :])
        text = copy.text[sent.text :]
        sent.text += len(text)
        sent.tokens += len(ids)
        ended = copy.finish_reason if copy.finish_reason in ("stop", "length") else None
        sent.finished = copy.finished
        shown_ids = ids if self._request.return_token_ids else UNSET
        return _News(text, logprobs, shown_ids, ended, copy.stop_reason)

    def _is_scored(self, output: RequestOutput) -> bool:
        """Whether the prompt's own logprobs, which a first frame may need, are all there."""
        found = output.prompt_logprobs
        return found is None or len(found) == len(output.prompt_token_ids)

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        request, found = self._request, output.prompt_logprobs
        fields: dict[str, Any] = {}
        if request.return_token_ids:
            fields["prompt_token_ids"] = in_pieces(output.prompt_token_ids)
        if request.prompt_logprobs is not None and found is not None:
            fields["prompt_logprobs"] = in_pieces(
                prompt_logprobs(output.prompt_token_ids, found, request.prompt_logprobs)
            )
        return fields

    def _usage(self) -> Usage:
        outputs = self._outputs
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        copies = (self._shown(copy) for output in outputs for copy in output.outputs)
        new = sum(len(copy.token_ids) for copy in copies)
        return Usage(prompt, new, prompt + new, PromptTokensDetails(cached))

    def _shown(self, copy: CompletionOutput) -> CompletionOutput:
        return copy

    def _chunk_usage(self) -> Usage | UnsetType | None:
        if self._request.continuous_usage:
            return self._usage()
        return None if self._request.include_usage else UNSET

    def _settle(self, outputs: Sequence[RequestOutput]) -> None:
        self._outputs = outputs
        error = failure(outputs)
        if error is not None:
            raise error


def _frame(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


class CompletionFrames(_Frames):
    _request: CompletionRequest

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """ApiError where a sequence failed."""
        self._settle(outputs)
        choices: list[CompletionChoice] = []
        for output in outputs:
            for copy in output.outputs:
                choices.append(self._choice(_Sent(len(choices)), output, self._shown(copy)))
        return _encode(self._chunk(choices, self._usage()))

    def _chunk(self, choices: list[Any], usage: Any, **more: Any) -> Completion:
        return Completion(**self._names, choices=choices, usage=usage, **more)

    def _template(self, sent: _Sent) -> Completion:
        choice = CompletionChoice(
            index=sent.index, text=_BLANK, logprobs=None, finish_reason=None, stop_reason=None
        )
        return self._chunk([choice], self._chunk_usage())

    def _rich_delta(
        self, sent: _Sent, output: RequestOutput, copy: CompletionOutput
    ) -> Iterator[bytes]:
        choice = self._choice(sent, output, copy)
        says = choice.text or choice.token_ids or choice.finish_reason or choice.logprobs
        if says or not sent.started:
            yield _frame(self._chunk([choice], self._chunk_usage()))

    def _choice(
        self, sent: _Sent, output: RequestOutput, copy: CompletionOutput
    ) -> CompletionChoice:
        request = self._request
        echoed, fields, scores = "", {}, None
        if not sent.started:
            fields = self._prompt_fields(output)
            if request.logprobs is not None:
                sent.scores = CompletionScores(
                    self._tokenizer, request.params.skip_special_tokens, request.logprobs
                )
            if request.echo:
                echoed = self._prompt_text(output)
                if sent.scores is not None and output.prompt_logprobs is not None:
                    scores = sent.scores.prompt(
                        output.prompt_token_ids, output.prompt_logprobs, echoed
                    )
        news = self._take(sent, copy)
        logprobs = joined(scores, news.logprobs) if scores and news.logprobs else scores
        logprobs = logprobs or news.logprobs
        if logprobs is not None:
            logprobs.top_logprobs = in_pieces(logprobs.top_logprobs)
        return CompletionChoice(
            index=sent.index,
            text=echoed + news.text,
            logprobs=logprobs,
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
            token_ids=news.token_ids,
            **fields,
        )

    def _logprobs(self, sent: _Sent, ids: list[int], logprobs: Logprobs) -> Any:
        assert sent.scores is not None
        return sent.scores.answer(ids, logprobs)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        skip = self._request.params.skip_special_tokens
        return self._tokenizer.decode(output.prompt_token_ids, skip)

    def _shown(self, copy: CompletionOutput) -> CompletionOutput:
        if self._request.generates:
            return copy
        # the token was not asked for: see CompletionRequest
        ended = "length" if copy.finish_reason == "stop" else copy.finish_reason
        return CompletionOutput(copy.index, finish_reason=ended)


class ChatFrames(_Frames):
    _request: ChatRequest

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """ApiError where a sequence failed."""
        self._settle(outputs)
        (output,) = outputs
        choices = []
        for copy in output.outputs:
            sent = _Sent(copy.index)
            news = self._take(sent, copy)
            choices.append(
                ChatChoice(
                    index=sent.index,
                    message=ChatMessage("assistant", news.text),
                    logprobs=news.logprobs,
                    finish_reason=news.finish_reason,
                    stop_reason=news.stop_reason,
                    token_ids=news.token_ids,
                )
            )
        fields = self._prompt_fields(output)
        return _encode(
            ChatCompletion(**self._names, choices=choices, usage=self._usage(), **fields)
        )

    def _chunk(self, choices: list[Any], usage: Any, **more: Any) -> ChatChunk:
        return ChatChunk(**self._names, choices=choices, usage=usage, **more)

    def _template(self, sent: _Sent) -> ChatChunk:
        return self._chunk([_chunk_choice(sent, ChatDelta(content=_BLANK))], self._chunk_usage())

    def _rich_delta(
        self, sent: _Sent, output: RequestOutput, copy: CompletionOutput
    ) -> Iterator[bytes]:
        if not sent.started:
            role = _chunk_choice(sent, ChatDelta(role="assistant", content=""))
            # what is said of the prompt is said once
            is_first = not any(sent.started for sent in self._sent.values())
            fields = self._prompt_fields(output) if is_first else {}
            yield _frame(self._chunk([role], self._chunk_usage(), **fields))
        news = self._take(sent, copy)
        if news.text or news.finish_reason or news.token_ids or news.logprobs:
            delta = ChatDelta(content=news.text) if news.text else ChatDelta()
            choice = _chunk_choice(sent, delta, news)
            yield _frame(self._chunk([choice], self._chunk_usage()))

    def _logprobs(self, sent: _Sent, ids: list[int], logprobs: Logprobs) -> Any:
        assert self._request.logprobs is not None
        return chat_logprobs(self._tokenizer, ids, logprobs, self._request.logprobs)


def _chunk_choice(sent: _Sent, delta: ChatDelta, news: _News = _NOTHING) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=sent.index,
        delta=delta,
        logprobs=news.logprobs,
        finish_reason=news.finish_reason,
        stop_reason=news.stop_reason,
        token_ids=news.token_ids,
    )
