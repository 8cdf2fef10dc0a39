"""The output processor: makes text of the token ids that the core samples, and one RequestOutput of
all sequences of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import cast

import msgspec

from trueline.engine.messages import CoreOutput, CoreRequest, TokenScore
from trueline.engine.params import SamplingParams, sequence_seed
from trueline.errors import UsageError
from trueline.grammar.constraint import Constraint
from trueline.outputs import (
    CompletionOutput,
    Logprob,
    MalformedCall,
    OutputPart,
    PartKind,
    RequestOutput,
    ToolCall,
)
from trueline.text.answers import AnswerReader
from trueline.text.detokenize import Detokenizer
from trueline.text.formats.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Malformed,
    Reasoning,
)
from trueline.text.stop import StopChecker, StopStrings
from trueline.text.tokenizer import Tokenizer, bad_word_ids

Prompt = str | Mapping[str, object]


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[str | None, list[int]]:
    """The text, where there is one, and its tokens."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise UsageError(
                f"prompt: found keys {sorted(prompt)}; accepted: 'prompt' or 'prompt_token_ids'"
            )
        if "prompt_token_ids" in prompt:
            text = cast("str | None", prompt.get("prompt"))
            return text, _checked(prompt["prompt_token_ids"], vocab_size)
    given = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
    if not isinstance(given, str):
        raise UsageError(
            f"prompt: found {type(given).__name__}; accepted: text, "
            "{'prompt': text} or {'prompt_token_ids': [...]}"
        )
    if tokenizer is None:
        raise UsageError("a text prompt needs a tokenizer: give prompt_token_ids instead")
    return given, _checked(tokenizer.encode(given), vocab_size)


def _checked(ids: object, vocab_size: int) -> list[int]:
    values = list(cast("Iterable[int]", ids))
    if not values:
        raise UsageError("the prompt is empty: accepted: at least one token")
    for token in values:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UsageError(f"prompt token {token!r}: accepted: ids from 0 to {vocab_size - 1}")
    return values


class PreparedParams:
    """SamplingParams with stop strings and bad words made ready for use, once for all prompts that
    share them. Not needed once the requests are in the core."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        constraint: Constraint | None = None,
    ) -> None:
        """`constraint`: what form the output has, where that is more than the params say. Compiling
        their `structured_outputs` may take a second."""
        self.params, self.tokenizer = params, tokenizer
        self.constraint = constraint
        if constraint is None and params.structured_outputs is not None:
            self.constraint = params.structured_outputs.constraint()
        if self.constraint is not None and tokenizer is None:
            raise UsageError("structured_outputs need a tokenizer")
        self.stops = StopStrings(params.stop)
        if params.bad_words and tokenizer is None:
            raise UsageError("bad_words need a tokenizer")
        self.bad_word_ids = bad_word_ids(tokenizer, params.bad_words) if tokenizer else []
        self.of_sequence = [self._of_sequence(i) for i in range(params.n)]
        """The params of each of the n sequences of a prompt."""

    def _of_sequence(self, index: int) -> SamplingParams:
        params = self.params
        if params.n == 1 and params.structured_outputs is None:
            return params
        seed = None if params.seed is None else sequence_seed(params.seed, index)
        # the core is told of the constraint, not of what it was made from
        return msgspec.structs.replace(params, n=1, seed=seed, structured_outputs=None)

    def core_requests(
        self,
        state: RequestOutputState,
        eos_token_ids: list[int],
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[CoreRequest]:
        """One for every sequence of a prompt."""
        for name, params in zip(state.sequence_ids, self.of_sequence, strict=True):
            yield CoreRequest(
                request_id=name,
                prompt_token_ids=state.output.prompt_token_ids,
                params=params,
                eos_token_ids=eos_token_ids,
                bad_word_ids=self.bad_word_ids,
                priority=priority,
                cache_salt=cache_salt,
                constraint=self.constraint,
            )


class RequestOutputState:
    """A request on the text side: makes text of the tokens that the core samples for its n
    sequences, and adds it to `output`. The core knows a sequence by the request's id; where there
    are several, by the request's id and their index."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        prepared: PreparedParams,
        reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        """`reader`: makes what reads a sequence's tokens as an answer in a chat; without one, its
        text is all of them."""
        self._params, self._tokenizer = params, tokenizer = prepared.params, prepared.tokenizer
        self.output = RequestOutput(
            request_id,
            prompt,
            ids,
            None if params.prompt_logprobs is None else [None],
            [
                CompletionOutput(i, logprobs=None if params.logprobs is None else [])
                for i in range(params.n)
            ],
        )
        """The same object from the first token to the last."""
        several = params.n > 1
        self.sequence_ids = [
            f"{request_id}/{i}" if several else request_id for i in range(params.n)
        ]
        self._indices = {name: i for i, name in enumerate(self.sequence_ids)}
        self._one_by_one = bool(params.stop) or reader is not None
        self._texts: list[Detokenizer | AnswerReader] = []
        if tokenizer is not None:
            detokenizer = partial(Detokenizer, tokenizer, params.skip_special_tokens)
            self._texts = [(reader or detokenizer)() for _ in range(params.n)]
        self._stop_checkers = [
            StopChecker(prepared.stops, params.include_stop_str_in_output) for _ in range(params.n)
        ]
        self._stopped: list[str] = []
        self._num_read = 0
        """Tokens of the sequence that is being read."""

    def completion(self, sequence_id: str) -> CompletionOutput:
        return self.output.outputs[self._indices[sequence_id]]

    def update(self, output: CoreOutput) -> None:
        """Token by token where a stop string may end a sequence, or where tokens of reasoning are
        counted: the same, however many come at once."""
        index, request = self._indices[output.request_id], self.output
        if index == 0:
            request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += map(self._logprobs, output.prompt_scores)
        ids, scores = output.token_ids, output.scores
        step = 1 if self._one_by_one else max(len(ids), 1)
        for end in range(step, max(len(ids), 1) + 1, step):
            last = output if end >= len(ids) else None
            self._add(index, ids[end - step : end], scores[end - step : end], last)

    def fail(self, why: str) -> None:
        """End all sequences that have not ended, here and in the core."""
        for name, completion in zip(self.sequence_ids, self.output.outputs, strict=True):
            if not completion.finished:
                completion.finish_reason = "error"
                completion.error = f"request '{self.output.request_id}': {why}"
                self._stopped.append(name)

    def to_stop(self) -> list[str]:
        """Ids of sequences that ended here, as by a stop string, and still run in the core; each is
        returned once."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _add(
        self, index: int, ids: list[int], scores: list[TokenScore], last: CoreOutput | None
    ) -> None:
        """`last`: the output that ends with these tokens."""
        completion = self.output.outputs[index]
        if completion.finished:
            return
        for token, score in zip(ids, scores, strict=True):
            completion.token_ids.append(token)
            if completion.logprobs is not None:
                total = completion.cumulative_logprob or 0.0
                completion.cumulative_logprob = total + score.logprob
                completion.logprobs.append(self._logprobs(score))
        reason = last.finish_reason if last else None
        if self._texts:
            shows_end = self._params.include_stop_str_in_output
            hides_end = reason == "stop" and not (shows_end or (last and last.complete))
            # the end token is not part of the text
            self._num_read = len(completion.token_ids) - (hides_end and bool(ids))
            self._read(index, ids[:-1] if hides_end else ids)
        if last is not None and reason and not completion.finished:
            self._add_text(index, self._rest(index), last=True)
            if not completion.finished:
                completion.finish_reason, completion.stop_reason = reason, last.stop_reason
                completion.error, completion.client_error = last.error, last.client_error

    def _read(self, index: int, ids: list[int]) -> None:
        text, completion = self._texts[index], self.output.outputs[index]
        if isinstance(text, Detokenizer):
            self._add_text(index, text.push(ids))
            return
        for token in ids:
            before = text.thinking
            self._take(index, text.push(token))
            # else the token was a marker, or the last of one
            completion.num_reasoning_tokens += before and text.thinking

    def _rest(self, index: int) -> str:
        """The text that the last tokens leave."""
        if not self._texts:
            return ""
        text = self._texts[index]
        if isinstance(text, Detokenizer):
            return text.flush()
        self._take(index, text.finish())
        return ""

    def _take(self, index: int, events: Iterable[Event]) -> None:
        """Stop strings are looked for in content alone."""
        completion = self.output.outputs[index]
        for event in events:
            match event:
                case _ if completion.finished:
                    return
                case Reasoning(text):
                    self._extend(completion, "reasoning", len(completion.reasoning))
                    completion.reasoning += text
                case Content(text):
                    self._add_text(index, text)
                case CallStart(_, call_id, name):
                    assert call_id is not None, "AnswerReader gives those ids that a format has not"
                    # what a call stands behind begins no stop string any more
                    self._append(completion, self._stop_checkers[index].flush())
                    self._extend(completion, "call", len(completion.calls))
                    completion.calls.append(ToolCall(call_id, name, len(completion.text)))
                case Arguments(call, text):
                    completion.calls[call].arguments += text
                case CallEnd(call):
                    completion.calls[call].ended = True
                    self._after_call(index)
                case Malformed(begun, reason, text):
                    completion.malformed.append(MalformedCall(begun, reason, text))
                    self._add_text(index, text)

    def _after_call(self, index: int) -> None:
        text, completion = self._texts[index], self.output.outputs[index]
        assert isinstance(text, AnswerReader)
        if text.ends_after_call:
            completion.finish_reason = "stop"
            self._stopped.append(self.sequence_ids[index])

    def _add_text(self, index: int, text: str, last: bool = False) -> None:
        completion, stop_checker = self.output.outputs[index], self._stop_checkers[index]
        if len(completion.token_ids) < self._params.min_tokens:
            self._append(completion, text)  # too early to stop
        elif text:
            found = stop_checker.push(text)
            self._append(completion, found.text)
            if found.matched is not None:
                completion.finish_reason, completion.stop_reason = "stop", found.matched
                self._stopped.append(self.sequence_ids[index])
                return
        if last:
            self._append(completion, stop_checker.flush())

    def _append(self, completion: CompletionOutput, text: str) -> None:
        if text:
            self._extend(completion, "content", len(completion.text))
            completion.text += text

    def _extend(self, completion: CompletionOutput, kind: PartKind, start: int) -> None:
        """The answer's last part grows, or one of this kind begins."""
        parts, read = completion.parts, self._num_read
        if not parts or kind == "call" or parts[-1].kind != kind:
            parts.append(OutputPart(kind, start, read - 1 if parts else 0, read))
        parts[-1].end_token = read

    def _logprobs(self, score: TokenScore) -> dict[int, Logprob]:
        """The likeliest tokens by rank, and the token itself."""
        found = {
            token: Logprob(value, rank, self._text(token))
            for rank, (token, value) in enumerate(score.top, 1)
        }
        if score.token_id not in found:
            found[score.token_id] = Logprob(score.logprob, score.rank, self._text(score.token_id))
        return found

    def _text(self, token: int) -> str | None:
        return self._tokenizer.token_text(token) if self._tokenizer else None
