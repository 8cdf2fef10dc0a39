"""What is rehearsed, and what comes out: projected steps, memory, and all that was assumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from trueline.bench.gpu.roofline import decode_bytes
from trueline.bench.gpu.steps import replay_time
from trueline.bench.models import find_bench_model
from trueline.bench.ranks.projection import (
    Deeper,
    Interconnect,
    Projected,
    RankMemory,
    StepCost,
    projected,
    whole_cost,
)
from trueline.bench.ranks.rank import Clock, LayerKind, Rank, Rows, Step, rank_spec
from trueline.config import EngineConfig
from trueline.device import Device, find_device
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.plan.memory import GPU_WORKSPACE, cache_budget
from trueline.plan.plan import Plan, make_plan
from trueline.spec.feedforward import MoESpec
from trueline.spec.model import ModelSpec
from trueline.utils.json_types import JSON

REPEATS = 9
"""Of a step on a CPU, after one to warm up. The shortest counts: a layer's time is a difference of
two steps, and what other programs take may be more."""
GPU_REPEATS = 4
"""Likewise, of several steps in a row: those that first ask for memory take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is rehearsed."""

    interconnect: Interconnect
    expert_parallel: bool = False
    requests: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    prefill_tokens: int = 8192
    depth: int = 2
    """Layers of a kind by which a deeper model exceeds the shallow one."""
    kv_cache_dtype: str = "auto"
    gpu_memory: int | None = None
    """Bytes of each rank's GPU; None: as many as this device has."""
    gpu_memory_utilization: float | None = None

    @property
    def decode(self) -> list[Rows]:
        return [[(self.context, 1)] * count for count in self.requests]

    @property
    def prefill(self) -> Rows:
        """Prompts of `context` tokens, the last one shorter if need be."""
        full, rest = divmod(self.prefill_tokens, self.context)
        return [(0, self.context)] * full + ([(0, rest)] if rest else [])

    def config(self, **sizes: Any) -> EngineConfig:
        return EngineConfig(
            load_format="dummy",
            enable_prefix_caching=False,
            max_model_len=self.context + 1,
            max_num_seqs=max(*self.requests, len(self.prefill)),
            max_num_batched_tokens=max(*self.requests, self.prefill_tokens),
            kv_cache_dtype=self.kv_cache_dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            **sizes,
        )

    def check(self, spec: ModelSpec) -> None:
        if not self.requests or min(*self.requests, self.prefill_tokens, self.depth) < 1:
            raise UsageError(
                "--requests, --prefill-tokens and --depth take whole numbers from 1 up"
            )
        if not 0 < self.context < spec.max_position:
            raise UsageError(
                f"--context {self.context}: accepted for this model: 1 to {spec.max_position - 1}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    model: str
    scenario: Scenario
    spec: ModelSpec
    """The first rank's."""
    plan: Plan
    """Of the whole model on that rank; its blocks and slots are not planned."""
    kinds: list[LayerKind]
    decode: list[Projected]
    prefill: Projected
    memory: RankMemory
    local_pairs: float | None
    """Which part of the pairs of tokens and experts the rank computed; None: no experts."""
    seconds: float

    def assumptions(self) -> Iterator[str]:
        device, link = self.plan.device, self.scenario.interconnect
        if not device.is_gpu:
            yield f"figures are of this CPU ({device.name}): they say nothing about GPUs"
        yield (
            f"one rank of {link.ranks} was measured ({device.name}); every rank is as fast, and "
            "none waits for another"
        )
        yield "layers of one kind take the same time; embedding, head and sampling are there once"
        if link.ranks > 1:
            yield (
                f"a collective takes {1e6 * link.latency:g} µs and its bytes "
                f"{link.bandwidth / 1e9:g} GB/s of bus bandwidth; none overlaps with computing"
            )
        yield from self._routing()
        how = "captured decode steps on the device alone" if self.plan.graphs else "eager steps"
        yield f"{how}; scheduling and text are not in it"
        yield (
            f"decode at {self.scenario.context:,} positions of context, prefill of prompts of as "
            f"many tokens, {self.scenario.prefill_tokens:,} a step"
        )
        total = self.scenario.gpu_memory or device.total_memory
        steps = f", {GPU_WORKSPACE / 1e9:.1f} GB set aside for steps" if device.is_gpu else ""
        share = self.plan.limits.memory_share
        yield f"memory: {total / 1e9:,.0f} GB a rank, {share:.0%} of it ours{steps}"

    def _routing(self) -> Iterator[str]:
        experts = [
            layer.feed_forward.experts
            for layer in self.spec.layers
            if isinstance(layer.feed_forward, MoESpec)
        ]
        if not experts or self.local_pairs is None:
            return
        held = experts[0]
        if held.count == held.total:
            yield f"each rank holds a part of all {held.total} experts, and computes every pair"
            return
        yield (
            f"each rank holds {held.count} of {held.total} experts; routing is uniform: of random "
            f"weights this rank had {self.local_pairs:.1%} of the pairs, "
            f"{held.count / held.total:.1%} is even"
        )

    def as_json(self) -> JSON:
        device = self.plan.device
        return {
            "model": self.model,
            "device": {"kind": device.kind, "name": device.name},
            "tensor_parallel_size": self.scenario.interconnect.ranks,
            "enable_expert_parallel": self.scenario.expert_parallel,
            "context": self.scenario.context,
            "interconnect": asdict(self.scenario.interconnect),
            "layers": {kind.name: len(kind.layers) for kind in self.kinds},
            "decode": [each.as_json() for each in self.decode],
            "prefill": self.prefill.as_json(),
            "memory": self.memory.as_json(max(self.scenario.requests)),
            "local_pairs": self.local_pairs,
            "plan": list(self.plan.lines()),
            "assumptions": list(self.assumptions()),
            "seconds": self.seconds,
        }


def rehearse(
    model: str, scenario: Scenario, say: Callable[[str], None], clock: Clock | None = None
) -> Rehearsal:
    """`clock`: instead of the device's."""
    start = time.perf_counter()

    def tell(text: str) -> None:
        say(f"{model}, {time.perf_counter() - start:.0f} s: {text}")

    whole = read_model(find_bench_model(model)[0])
    scenario.check(whole)
    ranks = scenario.interconnect.ranks
    spec = rank_spec(whole, ranks, expert_parallel=scenario.expert_parallel)
    device = find_device("auto")
    plan = make_plan(spec, scenario.config(num_gpu_blocks_override=1, num_state_slots=1), device)
    rank = Rank(spec, scenario.config(), device, ranks, scenario.depth)
    tell(f"weights of {len(rank.built)} layers of {len(spec.layers)} drawn")
    if rank.plan.graphs:
        rank.compile(scenario.decode, scenario.prefill)
        tell("kernels compiled")
    decode, prefill = _measure(rank, scenario, clock or step_seconds, tell)
    memory = _memory(rank, plan, scenario)
    return Rehearsal(
        model=model,
        scenario=scenario,
        spec=spec,
        plan=plan,
        kinds=rank.kinds,
        decode=[
            projected(n, n, cost, scenario.interconnect, _roofline(spec, plan, n, scenario.context))
            for n, cost in zip(scenario.requests, decode, strict=True)
        ],
        prefill=projected(
            len(scenario.prefill), scenario.prefill_tokens, prefill, scenario.interconnect
        ),
        memory=memory,
        local_pairs=rank.local_pairs(scenario.prefill),
        seconds=time.perf_counter() - start,
    )


def step_seconds(step: Step, device: Device) -> float:
    if device.is_gpu:
        return 1e-6 * min(replay_time(step.run) for _ in range(GPU_REPEATS))
    step.run()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step.run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _measure(
    rank: Rank, scenario: Scenario, clock: Clock, tell: Callable[[str], None]
) -> tuple[list[StepCost], StepCost]:
    """Decode steps and the prefill step of the whole model."""

    def costs(kept: tuple[int, ...], what: str) -> list[StepCost]:
        found = list(rank.costs(kept, scenario.decode, scenario.prefill, clock))
        tell(f"{what}: {', '.join(f'{1e3 * cost.compute:.3f}' for cost in found)} ms")
        return found

    shallow = costs(rank.shallow(), "a layer of each kind")
    deeper = [
        (kind, more, costs(rank.deeper(kind), f"{more} more of {kind.name}"))
        for kind in rank.kinds
        if (more := len(rank.deeper(kind)) - len(rank.kinds))
    ]
    *decode, prefill = [
        whole_cost(
            cost,
            [Deeper(found[cell], more, len(kind.layers) - 1) for kind, more, found in deeper],
        )
        for cell, cost in enumerate(shallow)
    ]
    return decode, prefill


def _memory(rank: Rank, plan: Plan, scenario: Scenario) -> RankMemory:
    device = plan.device
    total = scenario.gpu_memory or device.total_memory
    weights = rank.weight_bytes()
    free = replace(device, total_memory=total, free_memory=total)
    return RankMemory(
        weights=weights,
        token=sum(group.block_bytes // group.block_size for group in plan.groups),
        sequence=plan.slots.slot_bytes if plan.slots else 0,
        budget=cache_budget(scenario.config(), free, plan.limits, weights, None),
    )


def _roofline(spec: ModelSpec, plan: Plan, requests: int, context: int) -> float | None:
    if not plan.device.is_gpu:
        return None
    return decode_bytes(spec, plan.kinds, requests, context).seconds
