"""The offline API: `LLM` for batches, `LLMEngine` below it for those who drive the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from trueline.config import EngineConfig
from trueline.engine.grammars import grammars_of
from trueline.engine.loading import Progress, load_engine
from trueline.engine.params import SamplingParams, default_params
from trueline.errors import EngineBroken, UsageError, described, did_you_mean
from trueline.models import read_model
from trueline.output_processor import (
    PreparedParams,
    Prompt,
    RequestOutputState,
    read_prompt,
)
from trueline.outputs import RequestOutput
from trueline.text.chat import Message, render_chat
from trueline.text.tokenizer import Tokenizer
from trueline.utils.builtin import DEFAULT_MODEL
from trueline.utils.gc_frozen import gc_frozen
from trueline.utils.hub import find_model
from trueline.utils.progress import generation_progress, progress_bar


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
        directory = find_model(model, check=partial(read_model, facts=self.config.facts))
        self.tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            own = find_model(tokenizer, weights=False) if tokenizer else directory
            self.tokenizer = Tokenizer.load(own)
        loaded = load_engine(directory, self.config, progress)
        self.spec, self.plan, self.core = loaded.spec, loaded.plan, loaded.core
        self.plan_lines = list(loaded.lines())
        self.startup_seconds = loaded.seconds
        self.eos_token_ids = list(self.spec.eos_token_ids)
        if self.tokenizer is not None:
            self.eos_token_ids = sorted({*self.eos_token_ids, *self.tokenizer.eos_ids})
        if self.tokenizer is not None:
            self.core.grammars = grammars_of(self.tokenizer, self.spec.vocab.total)
        config = {} if self.tokenizer is None else self.tokenizer.generation_config
        self.default_params = default_params(config)
        """What the model recommends to callers who say nothing."""
        self._requests: dict[str, RequestOutputState] = {}
        self._by_sequence: dict[str, RequestOutputState] = {}

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
        text, ids = read_prompt(prompt, self.tokenizer, self.spec.vocab.total)
        params.check_length(len(ids), self.plan.max_model_len)
        prepared = PreparedParams(params, self.tokenizer)
        request = RequestOutputState(request_id, text, ids, prepared)
        added: list[str] = []
        try:
            for core in prepared.core_requests(request, self.eos_token_ids, priority, cache_salt):
                self.core.add(core)
                added.append(core.request_id)
        except BaseException:
            for name in added:
                self.core.abort(name, report=False)
            raise
        self._requests[request_id] = request
        self._by_sequence.update(dict.fromkeys(request.sequence_ids, request))

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Prompt:
        """A conversation, rendered with the model's template."""
        if self.tokenizer is None:
            raise UsageError("chat needs a tokenizer")
        text = render_chat(
            chat_template or self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **dict(chat_template_kwargs or {}),
        )
        # the template writes its own special tokens
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def abort_request(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return False
        aborted = [self.core.abort(name) for name in request.sequence_ids]
        return any(aborted)

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Abort these and step until nothing is left, after an error or an interrupt."""
        with suppress(EngineBroken):  # then there is nothing to clear up, and the cause is known
            for name in list(request_ids):
                self.abort_request(name)
            while self.has_unfinished_requests():
                self.step()

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests) or self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One step of the core; the outputs of every request that it changed, in their whole
        present state. Requests whose step failed end with the finish_reason "error", and `error`
        says why. EngineBroken: all are lost."""
        changed: dict[str, RequestOutputState] = {}
        try:
            outputs = self.core.step()
        except EngineBroken:
            self._requests.clear()
            self._by_sequence.clear()
            raise
        for output in outputs:
            request = self._by_sequence.get(output.request_id)
            if request is None:  # the rest of a request that has ended, as by a stop string
                continue
            try:
                request.update(output)
            except Exception as error:  # in the tokenizer, say: other requests go on
                request.fail(f"its text could not be made: {described(error)}")
            changed[request.output.request_id] = request
            for name in request.to_stop():
                self.core.abort(name, report=False)
        for request in changed.values():
            if request.output.finished:
                del self._requests[request.output.request_id]
                for name in request.sequence_ids:
                    del self._by_sequence[name]
        return [request.output for request in changed.values()]


class LLM:
    """Generate for many prompts at once. `model` is a directory, a hub id (owner/name, or
    owner/name@revision) or a built-in model, which answers `chat`; by default the built-in
    witness-v3.

    >>> llm = LLM("path/to/model")
    >>> llm.generate(["Hello"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
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
        """One output per prompt, in order. `sampling_params`: one for all, or one for each; None is
        SamplingParams() with what the model's generation_config.json says. Where a step failed, its
        requests have the finish_reason "error", and `error` says why."""
        asked = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = self._params(sampling_params, len(asked))
        names = [str(self._count + i) for i in range(len(asked))]
        self._count += len(asked)
        try:
            for name, prompt, each in zip(names, asked, params, strict=True):
                self.llm_engine.add_request(name, prompt, each)
            done = self._run(len(names), use_tqdm)
        except BaseException:
            self.llm_engine.drop_requests(names)
            raise
        return [done[name] for name in names]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """One conversation (a list of messages) or several; rendered with the model's template."""
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        prompts = [
            self.llm_engine.chat_prompt(
                one,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for one in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer | None:
        return self.llm_engine.tokenizer

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams(**self.llm_engine.default_params)
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise UsageError(
                f"{len(given)} sampling_params for {count} prompts: one, or one for each"
            )
        return list(given)

    def _run(self, count: int, show: bool) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        shown = generation_progress(count, show and sys.stderr.isatty())
        with gc_frozen(), shown as report:
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
