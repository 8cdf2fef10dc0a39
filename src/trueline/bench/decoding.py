"""The same requests decode on through phases that differ in one thing, right after each other: only
their ratios mean something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trueline.bench.workload import Workload, stepped
from trueline.engine.params import SamplingParams
from trueline.errors import UsageError
from trueline.llm import LLMEngine
from trueline.utils.gc_frozen import gc_frozen

PROMPT = 128


@contextmanager
def decoding(engine: LLMEngine, batch: int) -> Iterator[None]:
    """Inside, every step of the engine is a decode step of `batch` requests."""
    prompts = Workload(batch, PROMPT, 1).prompts(engine.spec.vocab.total)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    names = [f"decoding-{i}" for i in range(batch)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    while len(started) < batch:
        started |= {out.request_id for out in stepped(engine) if out.outputs[0].token_ids}
    with gc_frozen():
        yield
    ended = [engine.abort_request(name) for name in names]
    if not all(ended):
        raise UsageError(
            f"the model's context of {engine.plan.max_model_len} tokens was full before the last "
            "phase ended: give fewer or shorter rounds"
        )
    while engine.has_unfinished_requests():
        engine.step()


def step_seconds(engine: LLMEngine, *, warm: int, least: int, seconds: float = 0.0) -> float:
    """The mean of at least so many steps, and of so many seconds, after `warm` others."""
    for _ in range(warm):
        stepped(engine)
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or steps < least:
        stepped(engine)
        steps += 1
    return elapsed / steps
