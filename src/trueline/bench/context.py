"""What a long context costs: decode steps at several lengths, the time inside attention over the
paged cache apart from the rest, and the memory a sequence takes, by what is kept."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from trueline.bench.cache_bytes import KindBytes, cache_bytes
from trueline.bench.models import find_bench_model
from trueline.bench.workload import Workload, bench_engine, measure, stepped
from trueline.cache.blocks import NULL_BLOCK
from trueline.cache.prefix import hash_blocks, prefix_salt
from trueline.engine.executor import local_runner
from trueline.engine.params import SamplingParams
from trueline.llm import LLMEngine
from trueline.models.statistics import cache_costs
from trueline.spec.fields import read_json
from trueline.spec.model import ModelSpec
from trueline.tiny.configs import without_indexer
from trueline.utils.json_types import JSON

ATTENTION = (
    "mla_decode", "mla_prefill", "index_scores", "topk", "sparse_mla", "compress", "sink_attention",
)  # fmt: skip
"""Ops whose time grows with the context."""


@dataclass(frozen=True, slots=True)
class ContextFigures:
    context: int
    batch: int
    step_ms: float
    attention_ms: float
    """Inside attention over the paged cache."""
    cpu_ms: float
    """Processor time of the step, all threads together: what other programs take of the cores is
    not in it."""
    attention_cpu_ms: float
    sequence_bytes: int
    """Cache and states of one sequence of that length."""
    all_latent_bytes: int | None
    """Of the same model with latent attention in every layer; None where no layer has it."""
    kinds: tuple[KindBytes, ...]
    """What one of the requests holds after its first step."""

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.attention_ms

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.batch / self.step_ms

    def as_json(self) -> JSON:
        return asdict(self) | {"rest_ms": self.rest_ms, "tokens_per_s": self.tokens_per_s}


def context_engine(
    model: str, contexts: list[int], batch: int, steps: int, dtype: str = "auto"
) -> LLMEngine:
    return bench_engine(
        model,
        caching=True,
        canary_interval=0,  # contents are made up behind their back
        dtype=dtype,
        max_num_seqs=max(batch, 1),
        max_model_len=max(contexts) + steps + 1,
    )


def measure_contexts(
    engine: LLMEngine, contexts: list[int], batch: int, steps: int, say: Callable[[str], None]
) -> list[ContextFigures]:
    """The longest first, so that nothing that grows with use flatters it."""
    clock = OpClock(engine)
    found = []
    for context in sorted(contexts, reverse=True):
        say(f"a context of {context:,} tokens, {batch} requests")
        found.append(_at(engine, clock, context, batch, steps))
    return sorted(found, key=lambda figures: figures.context)


class OpClock:
    """Adds up, by op, the time that an engine spends in ops over the paged cache."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        ops = local_runner(engine.core.executor).decoder.ops
        for holder in filter(None, (ops.latent, ops.sparse, ops.compressed)):
            for name, op in [*vars(holder).items()]:
                if name not in ATTENTION or op is None:
                    continue
                parts = vars(op)
                timed = {
                    each: self._timed(name, parts[each])
                    for each in ("prepare", "run")
                    if each in parts
                }
                setattr(holder, name, SimpleNamespace(**parts | timed))

    def _timed(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            start, cpu_start = time.perf_counter(), time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.cpu_seconds[name] += time.process_time() - cpu_start

        return run


def _at(engine: LLMEngine, clock: OpClock, context: int, batch: int, steps: int) -> ContextFigures:
    draw = random.Random(context)
    prompt = [draw.randrange(engine.spec.vocab.total) for _ in range(context)]
    pretend_computed(engine, prompt)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"context-{i}", {"prompt_token_ids": prompt}, params)
    stepped(engine)  # what is left of the prompts
    kinds = cache_bytes(engine, "context-0")
    times: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    while engine.has_unfinished_requests():
        clock.seconds.clear()
        clock.cpu_seconds.clear()
        start, cpu_start = time.perf_counter(), time.process_time()
        stepped(engine)
        times.append((time.perf_counter() - start, sum(clock.seconds.values())))
        cpu.append((time.process_time() - cpu_start, sum(clock.cpu_seconds.values())))
    return ContextFigures(
        context, batch, *_middle(times), *_middle(cpu), *sequence_bytes(engine.spec, context), kinds
    )


def _middle(steps: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the step that takes the median, in ms: whole, and inside attention."""
    whole, inside = sorted(steps)[len(steps) // 2]
    return 1e3 * whole, 1e3 * inside


def pretend_computed(engine: LLMEngine, prompt: list[int]) -> None:
    """Put a prompt's blocks (and its state) into the prefix cache with random contents: requests
    that ask for it find them, and no time is spent on computing them."""
    core = engine.core
    caches, groups = local_runner(core.executor).caches, core.blocks
    size = groups.lcm_block_size
    whole = (len(prompt) - 1) // size * size
    salt = prefix_salt(core.fingerprint)
    hashes = hash_blocks(prompt[:whole], groups.hash_size, salt, [])
    tables = groups.empty()
    for end in range(size, whole + 1, size):  # as a prompt's chunks come and go
        groups.allocate(tables, end)
        groups.register(tables, hashes, end - size, end)
        groups.trim(tables, end - size, end)
    for name, paged in caches.paged.items():
        held = tables[caches.group_of[name]]
        paged.randomise([block for block in held if block != NULL_BLOCK])
    groups.release(tables)
    if core.slots is not None:
        slots = core.slots.allocate(1)
        core.slots.register(slots[0], hashes[-1])
        for slotted in caches.slotted.values():
            slotted.randomise(slots)
        core.slots.release(slots)


def dense_engine(
    model: str, contexts: list[int], batch: int, steps: int, dtype: str = "auto"
) -> LLMEngine:
    """The same model attending to everything it has."""
    path, _ = find_bench_model(model)
    config = read_json(path / "config.json" if path.is_dir() else path)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(without_indexer(config)))
        return context_engine(scratch, contexts, batch, steps, dtype)


def prefill_rate(engine: LLMEngine, length: int) -> float:
    """Tokens a second of one prompt that nobody has asked for before."""
    return measure(engine, Workload(1, length, 1)).prefill_tokens_per_s


def sequence_bytes(spec: ModelSpec, context: int) -> tuple[int, int | None]:
    """Of one sequence; and if every layer were like the latent ones, where there are some."""
    costs = {cost.kind: cost for cost in cache_costs(spec)}
    ours = sum(
        cost.bytes_per_token * context + cost.state_bytes_per_sequence for cost in costs.values()
    )
    latent = costs.get("mla")
    if latent is None:
        return int(ours), None
    alike = latent.bytes_per_token * spec.num_layers // latent.layers * context
    return int(ours), int(alike)
