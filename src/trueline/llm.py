"""The offline API: `LLM` for batches, `LLMEngine` below it for those who drive the loop."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from trueline.config import EngineConfig
from trueline.engine.loading import Progress, load_engine
from trueline.engine.messages import CoreOutput, CoreRequest, TokenScore
from trueline.engine.params import SamplingParams, sequence_seed
from trueline.errors import RequestRejected, UsageError, did_you_mean
from trueline.locate import find_model
from trueline.outputs import CompletionOutput, Logprob, RequestOutput
from trueline.progress import generation_progress, progress_bar
from trueline.text.chat import render_chat
from trueline.text.detokenize import Detokenizer
from trueline.text.stop import StopChecker
from trueline.text.tokenizer import Tokenizer, bad_word_ids

Prompt = str | Mapping[str, Any]


class LLMEngine:
    """Text in, text out, one step at a time."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        directory = find_model(model)
        self.tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(find_model(tokenizer) if tokenizer else directory)
        loaded = load_engine(directory, self.config, progress)
        self.spec, self.plan, self.core = loaded.spec, loaded.plan, loaded.core
        self.expected = loaded.expected
        self.startup_seconds = loaded.seconds
        self.eos_token_ids = list(self.spec.eos_token_ids)
        if self.tokenizer is not None:
            self.eos_token_ids = sorted({*self.eos_token_ids, *self.tokenizer.eos_ids})
        self._requests: dict[str, _Request] = {}
        self._parent: dict[str, _Request] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if request_id in self._requests:
            raise UsageError(f"request_id '{request_id}' is in use")
        params.check_model(self.spec.vocab.total, self.config.max_logprobs)
        text, ids = self._tokens(prompt)
        request = _Request(request_id, text, ids, params, self.tokenizer)
        words = params.bad_words or ()
        if words and self.tokenizer is None:
            raise UsageError("bad_words need a tokenizer")
        banned = bad_word_ids(self.tokenizer, words) if words and self.tokenizer else []
        added: list[str] = []
        try:
            for copy in request.copies:
                self.core.add(
                    CoreRequest(
                        request_id=copy.core_id,
                        prompt_token_ids=ids,
                        params=copy.params,
                        eos_token_ids=self.eos_token_ids,
                        bad_word_ids=banned,
                        priority=priority,
                        cache_salt=cache_salt,
                    )
                )
                added.append(copy.core_id)
        except RequestRejected:
            for core_id in added:
                self.core.abort(core_id, tell=False)
            raise
        self._requests[request_id] = request
        self._parent.update({copy.core_id: request for copy in request.copies})

    def abort_request(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return False
        aborted = [self.core.abort(copy.core_id) for copy in request.copies]
        return any(aborted)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests) or self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One step of the core; every request that has news, in its whole present state."""
        changed: dict[str, _Request] = {}
        for news in self.core.step():
            request = self._parent.get(news.request_id)
            if request is None:  # the rest of a request that has ended, as by a stop string
                continue
            request.take(news)
            changed[request.request_id] = request
            for core_id in request.to_stop():
                self.core.abort(core_id, tell=False)
        outputs = []
        for request in changed.values():
            outputs.append(request.output())
            if request.finished:
                del self._requests[request.request_id]
                for copy in request.copies:
                    del self._parent[copy.core_id]
        return outputs

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise UsageError(
                    f"prompt: found keys {sorted(prompt)}; accepted: 'prompt' or 'prompt_token_ids'"
                )
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._checked(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise UsageError(
                f"prompt: found {type(prompt).__name__}; accepted: text, "
                "{'prompt': text} or {'prompt_token_ids': [...]}"
            )
        if self.tokenizer is None:
            raise UsageError("a text prompt needs a tokenizer: give prompt_token_ids instead")
        return prompt, self._checked(self.tokenizer.encode(prompt))

    def _checked(self, ids: Any) -> list[int]:
        limit = self.spec.vocab.total
        values = list(ids)
        if not values:
            raise UsageError("the prompt is empty: accepted: at least one token")
        for token in values:
            if type(token) is not int or not 0 <= token < limit:
                raise UsageError(f"prompt token {token!r}: accepted: ids from 0 to {limit - 1}")
        return values


class LLM:
    """Generate for many prompts at once.

    >>> llm = LLM("path/to/model")
    >>> llm.generate(["Hello"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        with progress_bar("loading weights") as progress:
            self.llm_engine = LLMEngine(
                model,
                tokenizer=tokenizer,
                skip_tokenizer_init=skip_tokenizer_init,
                progress=progress,
                **options,
            )
        self._count = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. `sampling_params`: one for all, or one for each."""
        asked = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = _one_each(sampling_params, len(asked))
        names = [str(self._count + i) for i in range(len(asked))]
        self._count += len(asked)
        try:
            for name, prompt, each in zip(names, asked, params, strict=True):
                self.llm_engine.add_request(name, prompt, each)
            done = self._run(len(names), use_tqdm)
        except BaseException:
            for name in names:
                self.llm_engine.abort_request(name)
            while self.llm_engine.has_unfinished_requests():
                self.llm_engine.step()
            raise
        return [done[name] for name in names]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation (a list of messages) or several; rendered with the model's template."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise UsageError("chat needs a tokenizer")
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        prompts = []
        for one in messages if several else [messages]:
            text = render_chat(
                chat_template or tokenizer,
                one,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **dict(chat_template_kwargs or {}),
            )
            # the template writes its own special tokens
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer | None:
        return self.llm_engine.tokenizer

    def _run(self, count: int, show: bool) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with generation_progress(count, show and sys.stderr.isatty()) as report:
            while len(done) < count:
                for output in self.llm_engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        report(len(done), sum(len(o.token_ids) for o in output.outputs))
        return done


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = {item.name for item in fields(EngineConfig)}
    for name in options:
        if name not in known:
            raise UsageError(
                f"unknown argument '{name}'; accepted: {', '.join(sorted(known))}"
                f"{did_you_mean(name, known)}"
            )
    return EngineConfig(**options)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling_params for {count} prompts: one, or one for each")
    return list(params)


class _Request:
    """A user's request: n copies in the core, put together again."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id, self.prompt, self.ids, self.params = request_id, prompt, ids, params
        self.tokenizer = tokenizer
        self.copies = [_Copy(self, i) for i in range(params.n)]
        self.num_cached_tokens = 0
        self.prompt_scores: list[TokenScore] = []

    @property
    def finished(self) -> bool:
        return all(copy.completion.finished for copy in self.copies)

    def take(self, news: CoreOutput) -> None:
        copy = next(copy for copy in self.copies if copy.core_id == news.request_id)
        if copy.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, news.num_cached_tokens)
            self.prompt_scores += news.prompt_scores
        copy.take(news)

    def to_stop(self) -> list[str]:
        """Copies that a stop string has ended and the core does not know of yet."""
        ended = [copy for copy in self.copies if copy.stopped_by_text]
        for copy in ended:
            copy.stopped_by_text = False
        return [copy.core_id for copy in ended]

    def output(self) -> RequestOutput:
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self.logprobs(score) for score in self.prompt_scores)]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.ids,
            prompt_logprobs,
            [copy.completion for copy in self.copies],
            self.num_cached_tokens,
        )

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


class _Copy:
    def __init__(self, request: _Request, index: int) -> None:
        params = request.params
        self.request, self.index = request, index
        self.core_id = f"{request.request_id}/{index}"
        seed = None if params.seed is None else sequence_seed(params.seed, index)
        self.params = msgspec.structs.replace(params, n=1, seed=seed)
        logprobs: list[dict[int, Logprob] | None] | None = []
        self.completion = CompletionOutput(
            index, logprobs=logprobs if params.logprobs is not None else None
        )
        self.text = (
            Detokenizer(request.tokenizer, params.skip_special_tokens)
            if request.tokenizer
            else None
        )
        self.stops = StopChecker(list(params.stop), params.include_stop_str_in_output)
        self.stopped_by_text = False

    def take(self, news: CoreOutput) -> None:
        done = self.completion
        if done.finished:
            return
        for token, score in zip(news.token_ids, news.scores, strict=True):
            done.token_ids.append(token)
            if done.logprobs is not None:
                done.cumulative_logprob = (done.cumulative_logprob or 0.0) + score.logprob
                done.logprobs.append(self.request.logprobs(score))
        ended_by_token = news.finish_reason == "stop"
        if self.text is not None:
            shown = news.token_ids
            if ended_by_token and not self.params.include_stop_str_in_output:
                shown = shown[:-1]  # the end token is not part of the text
            self._add_text(self.text.push(shown))
        if not done.finished and news.finish_reason:
            self._add_text(self.text.flush() if self.text else "", last=True)
            if not done.finished:
                done.finish_reason, done.stop_reason = news.finish_reason, news.stop_reason
                done.error = news.error

    def _add_text(self, text: str, last: bool = False) -> None:
        if len(self.completion.token_ids) < self.params.min_tokens:
            self.completion.text += text  # too early to stop
        elif text:
            found = self.stops.push(text)
            self.completion.text += found.text
            if found.matched is not None:
                self.completion.finish_reason = "stop"
                self.completion.stop_reason = found.matched
                self.stopped_by_text = True
                return
        if last:
            self.completion.text += self.stops.flush()
