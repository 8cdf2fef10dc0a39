"""The output processor: makes text of the token ids that the core samples, and one RequestOutput of
all sequences of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from trueline.engine.messages import CoreOutput, CoreRequest, TokenScore
from trueline.engine.params import SamplingParams, sequence_seed
from trueline.errors import UsageError
from trueline.outputs import CompletionOutput, Logprob, RequestOutput
from trueline.text.detokenize import Detokenizer
from trueline.text.stop import StopChecker, StopStrings
from trueline.text.tokenizer import Tokenizer, bad_word_ids

Prompt = str | Mapping[str, Any]


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
            return prompt.get("prompt"), _checked(prompt["prompt_token_ids"], vocab_size)
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        raise UsageError(
            f"prompt: found {type(prompt).__name__}; accepted: text, "
            "{'prompt': text} or {'prompt_token_ids': [...]}"
        )
    if tokenizer is None:
        raise UsageError("a text prompt needs a tokenizer: give prompt_token_ids instead")
    return prompt, _checked(tokenizer.encode(prompt), vocab_size)


def _checked(ids: Any, vocab_size: int) -> list[int]:
    values = list(ids)
    if not values:
        raise UsageError("the prompt is empty: accepted: at least one token")
    for token in values:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UsageError(f"prompt token {token!r}: accepted: ids from 0 to {vocab_size - 1}")
    return values


class PreparedParams:
    """SamplingParams with stop strings and bad words made ready for use, once for all prompts that
    share them."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.params, self.tokenizer = params, tokenizer
        self.stops = StopStrings(params.stop)
        if params.bad_words and tokenizer is None:
            raise UsageError("bad_words need a tokenizer")
        self.bad_word_ids = bad_word_ids(tokenizer, params.bad_words) if tokenizer else []
        self.each = [self._params_of(i) for i in range(params.n)]
        """The params of each of the n sequences of a prompt."""

    def _params_of(self, index: int) -> SamplingParams:
        params = self.params
        if params.n == 1:
            return params
        seed = None if params.seed is None else sequence_seed(params.seed, index)
        return msgspec.structs.replace(params, n=1, seed=seed)


class RequestOutputState:
    """The outputs of a user's request, put together from its n sequences in the core."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prepared: PreparedParams | None = None,
    ) -> None:
        self.request_id, self.prompt, self.ids, self.params = request_id, prompt, ids, params
        self.tokenizer = tokenizer
        self.prepared = prepared or PreparedParams(params, tokenizer)
        self.sequences = [SequenceOutputState(self, i) for i in range(params.n)]
        self.of_sequence = {sequence.core_id: sequence for sequence in self.sequences}
        self.stopped: list[str] = []
        """Core ids of sequences that ended here, as by a stop string, and still run in the core."""
        self._output = RequestOutput(
            request_id,
            prompt,
            ids,
            None if params.prompt_logprobs is None else [None],
            [sequence.completion for sequence in self.sequences],
        )

    def core_requests(
        self, eos_token_ids: list[int], priority: int = 0, cache_salt: str | None = None
    ) -> Iterator[CoreRequest]:
        """One for every sequence."""
        for sequence in self.sequences:
            yield CoreRequest(
                request_id=sequence.core_id,
                prompt_token_ids=self.ids,
                params=sequence.params,
                eos_token_ids=eos_token_ids,
                bad_word_ids=self.prepared.bad_word_ids,
                priority=priority,
                cache_salt=cache_salt,
            )

    @property
    def finished(self) -> bool:
        return all(sequence.completion.finished for sequence in self.sequences)

    def update(self, output: CoreOutput) -> None:
        sequence, request = self.of_sequence[output.request_id], self._output
        if sequence.index == 0:
            request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += map(self.logprobs, output.prompt_scores)
        sequence.update(output)

    def fail(self, why: str) -> None:
        """End all sequences that have not ended, here and in the core."""
        for sequence in self.sequences:
            if not sequence.completion.finished:
                sequence.completion.finish_reason = "error"
                sequence.completion.error = f"request '{self.request_id}': {why}"
                self.stopped.append(sequence.core_id)

    def to_stop(self) -> list[str]:
        """Core ids of sequences to abort in the core; each is returned once."""
        ended, self.stopped = self.stopped, []
        return ended

    def output(self) -> RequestOutput:
        """The same object every time: what is new is added to it."""
        return self._output

    def logprobs(self, score: TokenScore) -> dict[int, Logprob]:
        """The likeliest tokens by rank, and the token itself."""
        found = {
            token: Logprob(value, rank, self._text(token))
            for rank, (token, value) in enumerate(score.top, 1)
        }
        if score.token_id not in found:
            found[score.token_id] = Logprob(score.logprob, score.rank, self._text(score.token_id))
        return found

    def _text(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self.tokenizer else None


class SequenceOutputState:
    """The output of one of them."""

    def __init__(self, request: RequestOutputState, index: int) -> None:
        params = request.params
        self.request, self.index = request, index
        self.core_id = f"{request.request_id}/{index}"
        self.params = request.prepared.each[index]
        logprobs: list[dict[int, Logprob] | None] | None = []
        self.completion = CompletionOutput(
            index, logprobs=logprobs if params.logprobs is not None else None
        )
        self.text = (
            Detokenizer(request.tokenizer, params.skip_special_tokens)
            if request.tokenizer
            else None
        )
        self.stops = StopChecker(request.prepared.stops, params.include_stop_str_in_output)

    def update(self, output: CoreOutput) -> None:
        """Token by token where a stop string may end it: it ends at the same token, however many
        come at once."""
        ids, scores = output.token_ids, output.scores
        step = 1 if self.params.stop else max(len(ids), 1)
        for end in range(step, max(len(ids), 1) + 1, step):
            last = output if end >= len(ids) else None
            self._add(ids[end - step : end], scores[end - step : end], last)

    def _add(self, ids: list[int], scores: list[TokenScore], last: CoreOutput | None) -> None:
        """`last`: the output that ends with these tokens."""
        done = self.completion
        if done.finished:
            return
        for token, score in zip(ids, scores, strict=True):
            done.token_ids.append(token)
            if done.logprobs is not None:
                done.cumulative_logprob = (done.cumulative_logprob or 0.0) + score.logprob
                done.logprobs.append(self.request.logprobs(score))
        reason = last.finish_reason if last else None
        if self.text is not None:
            hides_end = reason == "stop" and not self.params.include_stop_str_in_output
            # the end token is not part of the text
            self._add_text(self.text.push(ids[:-1] if hides_end else ids))
        if last is not None and reason and not done.finished:
            self._add_text(self.text.flush() if self.text else "", last=True)
            if not done.finished:
                done.finish_reason, done.stop_reason = reason, last.stop_reason
                done.error = last.error

    def _add_text(self, text: str, last: bool = False) -> None:
        if len(self.completion.token_ids) < self.params.min_tokens:
            self.completion.text += text  # too early to stop
        elif text:
            found = self.stops.push(text)
            self.completion.text += found.text
            if found.matched is not None:
                self.completion.finish_reason = "stop"
                self.completion.stop_reason = found.matched
                self.request.stopped.append(self.core_id)
                return
        if last:
            self.completion.text += self.stops.flush()
