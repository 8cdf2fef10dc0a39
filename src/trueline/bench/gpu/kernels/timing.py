"""How kernels are timed here: captured in a graph, over inputs that take turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable

import torch

ENGINE = "--engine" in sys.argv
"""Time only what the engine takes, not the other ways; processes that are started see it too."""
Calls = list[Callable[[], object]]


def asked(ways: Iterable[tuple[str, Calls]]) -> list[tuple[str, Calls]]:
    """The engine's own way comes first."""
    return list(ways)[:1] if ENGINE else list(ways)


def graph_time(calls: Calls, repeat: int = 12) -> float:
    """Microseconds per call: the median over replays of a graph that has every call once. Give
    calls on different inputs, more than the cache holds together."""
    for call in calls[:2]:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeat + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times[3:])
