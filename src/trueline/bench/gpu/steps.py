"""What a captured decode step consists of: its kernels, how long each takes, and the gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from trueline.engine.executor import local_runner
from trueline.engine.memory import made_up_batch
from trueline.llm import LLMEngine
from trueline.utils.json_types import JSON

REPLAYS = 4
NAMED = 12
"""Kernels reported by name; the rest is summed up."""


def decode_profile(engine: LLMEngine, batch: int, context: int) -> JSON:
    """The graph replayed on contexts of one length, over whatever is in the cache. Nothing is
    drawn for anybody."""
    graphs = local_runner(engine.core.executor).graphs
    if graphs is None:
        return {}
    rows = made_up_batch(engine.core.plan, [(context, 1)] * batch, spread=True)
    replay = graphs.dummy_step(rows)
    kernels = kernel_times(replay)
    return {
        "step_us": replay_time(replay),
        "busy_us": sum(each.us for each in kernels),
        "launches_per_layer": sum(each.calls for each in kernels) / len(engine.spec.layers),
        "kernels": [each.as_json() for each in kernels[:NAMED]],
    }


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Of all launches of a kernel in one run."""

    name: str
    us: float
    calls: float

    def as_json(self) -> JSON:
        return {"name": self.name[:70], "us": round(self.us, 1), "calls": round(self.calls, 1)}


def kernel_times(run: Callable[[], object]) -> list[KernelTime]:
    """What a run launches, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in trace.key_averages():
        if event.self_device_time_total > 0:
            times[event.key] += event.self_device_time_total / REPLAYS
            calls[event.key] += event.count / REPLAYS
    return [KernelTime(name, us, calls[name]) for name, us in times.most_common()]


def replay_time(replay: Callable[[], object]) -> float:
    """Microseconds of one step on the device, the host left out."""
    for _ in range(3):
        replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(2 * REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(1000 * begin.elapsed_time(end) / (2 * REPLAYS))
