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

from trueline.benchmark import Workload, bench_engine, measure
from trueline.cache.prefix import hash_blocks, prefix_salt
from trueline.engine.params import SamplingParams
from trueline.llm import LLMEngine
from trueline.models.sizes import CacheCost, cache_costs
from trueline.spec.model import ModelSpec

ATTENTION = ("mla_decode", "mla_prefill")
"""Ops whose time grows with the context."""


@dataclass(frozen=True, slots=True)
class ContextFigures:
    context: int
    batch: int
    step_ms: float
    attention_ms: float
    """Inside attention over the paged cache."""
    sequence_bytes: int
    """Cache and states of one sequence of that length."""
    all_latent_bytes: int
    """Of the same model with latent attention in every layer."""

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.attention_ms

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.batch / self.step_ms

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"rest_ms": self.rest_ms, "tokens_per_s": self.tokens_per_s}


def context_engine(model: str, contexts: list[int], batch: int, steps: int) -> LLMEngine:
    return bench_engine(
        model, caching=True, max_num_seqs=max(batch, 1), max_model_len=max(contexts) + steps + 1
    )


def measure_contexts(
    engine: LLMEngine, contexts: list[int], batch: int, steps: int, say: Callable[[str], None]
) -> list[ContextFigures]:
    """The longest first, so that nothing that grows with use flatters it."""
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
    draw = random.Random(context)
    prompt = [draw.randrange(engine.spec.vocab.total) for _ in range(context)]
    pretend_computed(engine, prompt)
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
        batch,
        1e3 * statistics.median(whole),
        1e3 * inside[middle],
        *sequence_bytes(engine.spec, context),
    )


def pretend_computed(engine: LLMEngine, prompt: list[int]) -> None:
    """Put a prompt's blocks (and its state) into the prefix cache with random contents: requests
    that ask for it find them, and no time is spent on computing them."""
    core = engine.core
    size = core.plan.layout.block_size
    whole = (len(prompt) - 1) // size * size
    hashes = hash_blocks(prompt[:whole], size, prefix_salt(core.fingerprint), [])
    blocks = core.pool.allocate(len(hashes))
    for block, value in zip(blocks, hashes, strict=True):
        core.pool.register(block, value)
        core.runner.store.rows[:, block * size : (block + 1) * size].normal_()
    core.pool.release(blocks)
    if core.slots is not None and core.runner.states is not None:
        slots = core.slots.allocate(1)
        core.slots.register(slots[0], hashes[-1])
        core.runner.states.state[:, slots[0]].normal_()
        core.slots.release(slots)


def prefill_rate(engine: LLMEngine, length: int) -> float:
    """Tokens a second of one prompt that nobody has asked for before."""
    return measure(engine, Workload(1, length, 1)).prefill_tokens_per_s


def sequence_bytes(spec: ModelSpec, context: int) -> tuple[int, int]:
    """Of one sequence; and if every layer were like the latent ones."""
    costs = {cost.kind: cost for cost in cache_costs(spec)}
    latent: CacheCost = costs["mla"]
    ours = sum(
        cost.bytes_per_token * context + cost.state_bytes_per_sequence for cost in costs.values()
    )
    return ours, latent.bytes_per_token * spec.num_layers // latent.layers * context
