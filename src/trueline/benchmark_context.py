"""What a long context costs: decode steps at several lengths, the time inside attention over the
paged cache apart from the rest, and the memory a sequence takes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from trueline.benchmark import bench_engine
from trueline.engine.params import SamplingParams
from trueline.llm import LLMEngine
from trueline.models.sizes import CacheCost, cache_costs
from trueline.spec.model import ModelSpec

ATTENTION = ("mla_decode", "mla_prefill")
"""Ops whose time grows with the context."""


@dataclass(frozen=True, slots=True)
class ContextFigures:
    context: int
    step_ms: float
    attention_ms: float
    """Inside attention over the paged cache."""
    prefill_tokens_per_s: float
    sequence_bytes: int
    """Cache and states of one sequence of that length."""
    all_latent_bytes: int
    """Of the same model with latent attention in every layer."""

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.attention_ms

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"rest_ms": self.rest_ms}


def measure_contexts(
    model: str, contexts: list[int], batch: int, steps: int, say: Callable[[str], None]
) -> list[ContextFigures]:
    """The longest first, so that nothing that grows with use flatters it."""
    engine = bench_engine(
        model, caching=True, max_num_seqs=max(batch, 1), max_model_len=max(contexts) + steps + 1
    )
    clock = Clock(engine)
    found = []
    for context in sorted(contexts, reverse=True):
        say(f"a context of {context:,} tokens, {batch} requests")
        found.append(_at(engine, clock, context, batch, steps))
    return sorted(found, key=lambda figures: figures.context)


class Clock:
    """Adds up the time that an engine spends in ops over the paged cache."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds = 0.0
        ops = engine.core.runner.ops
        for name in ATTENTION:
            parts = vars(getattr(ops, name))
            timed = {part: self._timed(parts[part]) for part in ("prepare", "run") if part in parts}
            setattr(ops, name, SimpleNamespace(**parts | timed))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def _at(engine: LLMEngine, clock: Clock, context: int, batch: int, steps: int) -> ContextFigures:
    """One prompt is computed; the others share its cache and its state, so that filling it takes
    no longer for many than for one."""
    draw = random.Random(context)
    prompt = [draw.randrange(engine.spec.vocab.total) for _ in range(context)]
    first = time.perf_counter()
    _finish(engine, prompt, "first", 1)
    prefill = context / (time.perf_counter() - first)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"context-{i}", {"prompt_token_ids": prompt}, params)
    engine.step()  # what is left of the prompts
    whole, inside = [], []
    while engine.has_unfinished_requests():
        before, start = clock.seconds, time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
        inside.append(clock.seconds - before)
    middle = sorted(range(len(whole)), key=whole.__getitem__)[len(whole) // 2]
    return ContextFigures(
        context,
        1e3 * statistics.median(whole),
        1e3 * inside[middle],
        prefill,
        *sequence_bytes(engine.spec, context),
    )


def _finish(engine: LLMEngine, prompt: list[int], name: str, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()


def sequence_bytes(spec: ModelSpec, context: int) -> tuple[int, int]:
    """Of one sequence; and if every layer were like the latent ones."""
    costs = {cost.kind: cost for cost in cache_costs(spec)}
    latent: CacheCost = costs["mla"]
    ours = sum(
        cost.bytes_per_token * context + cost.state_bytes_per_sequence for cost in costs.values()
    )
    return ours, latent.bytes_per_token * spec.num_layers // latent.layers * context
