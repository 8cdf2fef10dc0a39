"""Responses as bytes: the whole, or the chunks of a stream, which joined are the whole.

Most chunks differ from the one before in nothing but the text: these are a template cut in two, and
only the text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypedDict, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from trueline.outputs import CompletionOutput, Logprobs, RequestOutput
from trueline.server.protocol.call_deltas import CallProgress, has_calls
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.failure import failure
from trueline.server.protocol.logprobs import (
    CompletionScores,
    TokenNames,
    joined,
    prompt_logprobs,
)
from trueline.server.protocol.raw_json import in_pieces
from trueline.server.protocol.requests import CompletionRequest, GenerateRequest
from trueline.server.protocol.responses import (
    ChatChunkChoice,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    Usage,
)
from trueline.text.tokenizer import Tokenizer

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
BLANK = "\0"
BLANK_JSON = encode(BLANK)
_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""Reasons of the core that OpenAI's protocol has."""


class Sent:
    """How much of one choice is out."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = self.tokens = self.reasoning = 0
        self.started = self.finished = False
        self.templates: dict[str, list[bytes]] = {}
        """By what is new: a chunk that says nothing else, cut where that stands."""
        self.scores: CompletionScores | None = None
        self.calls = CallProgress()


ChunkChoice = TypeVar("ChunkChoice", CompletionChoice, ChatChunkChoice)
Scores = TypeVar("Scores", CompletionLogprobs, ChatLogprobs)


class _Names(TypedDict):
    """What every chunk of a response says."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptFields(TypedDict, total=False):
    """What a request may ask to hear of its prompt."""

    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs


class Delta(NamedTuple, Generic[Scores]):
    text: str
    reasoning: str
    logprobs: Scores | None
    token_ids: list[int] | UnsetType
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Writer(Generic[ChunkChoice, Scores]):
    def __init__(
        self,
        response_id: str,
        created: int,
        fingerprint: str,
        request: GenerateRequest,
        tokenizer: Tokenizer,
    ) -> None:
        self.response_id = response_id
        self._names: _Names = {
            "id": response_id,
            "created": created,
            "model": request.model,
            "system_fingerprint": fingerprint,
        }
        self._request, self._tokenizer = request, tokenizer
        self._token_names = TokenNames(tokenizer, request.tokens_as_ids)
        self._sent: dict[int, Sent] = {}
        self._outputs: Sequence[RequestOutput] = ()
        self._failed = False
        scored, ids = request.logprobs is not None, request.return_token_ids
        self._is_rich = scored or ids or request.continuous_usage
        """Every chunk has more than a text."""

    def delta(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Chunks for what is new. `outputs` are those of all prompts, in their order. Where a
        sequence failed, the last chunk is the error."""
        self._outputs = outputs
        error = failure(outputs)
        for prompt, output in enumerate(outputs):
            if self._is_scored(output):
                for completion in output.outputs:
                    yield from self._completion_delta(prompt, output, self._shown(completion))
        if error is not None and not self._failed:
            self._failed = True
            yield self.failed(error)

    def weight(self, outputs: Sequence[RequestOutput]) -> int:
        """About how many tokens and logprobs the next chunks are made of; text alone is light."""
        request, found = self._request, 0
        if not self._is_rich and request.scores_per_prompt_token is None and self._sent:
            return 0
        for prompt, output in enumerate(outputs):
            for completion in output.outputs:
                sent = self._sent.get(prompt * request.params.n + completion.index)
                if sent is None or not sent.started:
                    found += len(output.prompt_token_ids) * (request.scores_per_prompt_token or 1)
                tokens = len(completion.token_ids) - (0 if sent is None else sent.tokens)
                found += tokens * (1 + (request.logprobs or 0))
        return found

    def end(self) -> bytes:
        """Behind the last chunk; with include_usage one more, without choices."""
        usage = event(self._chunk([], self._usage())) if self._request.include_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return error.event()

    def _completion_delta(
        self, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[bytes]:
        index = prompt * self._request.params.n + completion.index
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = Sent(index)
        if sent.started and not self._is_rich and completion.finish_reason is None:
            yield from self._plain_delta(sent, completion)
        elif not sent.finished and (completion.token_ids or completion.finished):
            if not sent.started:
                sent.templates = self._templates(sent)
            yield from self._rich_delta(sent, output, completion)
            sent.started = True

    def _plain_delta(self, sent: Sent, completion: CompletionOutput) -> Iterator[bytes]:
        if text := completion.text[sent.text :]:
            sent.text += len(text)
            yield encode(text).join(sent.templates["text"])

    def _rich_delta(
        self, sent: Sent, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[bytes]:
        raise NotImplementedError

    def _templates(self, sent: Sent) -> dict[str, list[bytes]]:
        raise NotImplementedError

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> msgspec.Struct:
        raise NotImplementedError

    def _logprobs(self, sent: Sent, ids: list[int], logprobs: Logprobs) -> Scores:
        raise NotImplementedError

    def _new_since(self, sent: Sent, completion: CompletionOutput) -> Delta[Scores]:
        """What is new of a completion; marks it as sent."""
        ids = completion.token_ids[sent.tokens :]
        logprobs = None
        if ids and self._request.logprobs is not None and completion.logprobs is not None:
            logprobs = self._logprobs(sent, ids, completion.logprobs[sent.tokens :])
        text, reasoning = completion.text[sent.text :], completion.reasoning[sent.reasoning :]
        sent.text += len(text)
        sent.reasoning += len(reasoning)
        sent.tokens += len(ids)
        ended = _ENDS.get(completion.finish_reason or "")
        if ended == "stop" and has_calls(completion):
            ended = "tool_calls"
        sent.finished = completion.finished
        shown_ids = ids if self._request.return_token_ids else UNSET
        return Delta(text, reasoning, logprobs, shown_ids, ended, completion.stop_reason)

    def _is_scored(self, output: RequestOutput) -> bool:
        """Whether the prompt's own logprobs, which a first chunk may need, are all there."""
        found = output.prompt_logprobs
        return found is None or len(found) == len(output.prompt_token_ids)

    def _prompt_fields(self, output: RequestOutput) -> PromptFields:
        request, found = self._request, output.prompt_logprobs
        fields: PromptFields = {}
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
        completions = [
            self._shown(completion) for output in outputs for completion in output.outputs
        ]
        new = sum(len(completion.token_ids) for completion in completions)
        details = self._details(completions)
        return Usage(prompt, new, prompt + new, PromptTokensDetails(cached), details)

    def _details(
        self, completions: Sequence[CompletionOutput]
    ) -> CompletionTokensDetails | UnsetType:
        return UNSET

    def _shown(self, completion: CompletionOutput) -> CompletionOutput:
        return completion

    def _chunk_usage(self) -> Usage | UnsetType | None:
        if self._request.continuous_usage:
            return self._usage()
        return None if self._request.include_usage else UNSET

    def _settle(self, outputs: Sequence[RequestOutput]) -> None:
        self._outputs = outputs
        error = failure(outputs)
        if error is not None:
            raise error


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def cut_at_blanks(chunk: msgspec.Struct, blanks: int = 1) -> list[bytes]:
    """Where its last blanks stand: what a client has named may look like one."""
    return event(chunk).rsplit(BLANK_JSON, blanks)


class CompletionWriter(Writer[CompletionChoice, CompletionLogprobs]):
    _request: CompletionRequest

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """ApiError where a sequence failed."""
        self._settle(outputs)
        choices: list[CompletionChoice] = []
        for output in outputs:
            for completion in output.outputs:
                choices.append(self._choice(Sent(len(choices)), output, self._shown(completion)))
        return encode(self._chunk(choices, self._usage()))

    def _chunk(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(**self._names, choices=choices, usage=usage)

    def _templates(self, sent: Sent) -> dict[str, list[bytes]]:
        choice = CompletionChoice(
            index=sent.index, text=BLANK, logprobs=None, finish_reason=None, stop_reason=None
        )
        return {"text": cut_at_blanks(self._chunk([choice], self._chunk_usage()))}

    def _rich_delta(
        self, sent: Sent, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[bytes]:
        choice = self._choice(sent, output, completion)
        says = choice.text or choice.token_ids or choice.finish_reason or choice.logprobs
        if says or not sent.started:
            yield event(self._chunk([choice], self._chunk_usage()))

    def _choice(
        self, sent: Sent, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        request = self._request
        echoed, scores = "", None
        fields: PromptFields = {}
        if not sent.started:
            fields = self._prompt_fields(output)
            if request.logprobs is not None:
                sent.scores = CompletionScores(
                    self._token_names, request.params.skip_special_tokens, request.logprobs
                )
            if request.echo:
                echoed = self._prompt_text(output)
                if sent.scores is not None and output.prompt_logprobs is not None:
                    scores = sent.scores.prompt(
                        output.prompt_token_ids, output.prompt_logprobs, echoed
                    )
        new = self._new_since(sent, completion)
        logprobs = joined(scores, new.logprobs) if scores and new.logprobs else scores
        logprobs = logprobs or new.logprobs
        if logprobs is not None:
            logprobs.top_logprobs = in_pieces(logprobs.top_logprobs)
        return CompletionChoice(
            index=sent.index,
            text=echoed + new.text,
            logprobs=logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            token_ids=new.token_ids,
            **fields,
        )

    def _logprobs(self, sent: Sent, ids: list[int], logprobs: Logprobs) -> CompletionLogprobs:
        assert sent.scores is not None
        return sent.scores.answer(ids, logprobs)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        skip = self._request.params.skip_special_tokens
        return self._tokenizer.decode(output.prompt_token_ids, skip)

    def _shown(self, completion: CompletionOutput) -> CompletionOutput:
        if self._request.generates:
            return completion
        # the token was not asked for: see CompletionRequest
        ended = "length" if completion.finish_reason == "stop" else completion.finish_reason
        return CompletionOutput(completion.index, finish_reason=ended)
