"""How kernels are timed here: captured in a graph, over alternating inputs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trueline.bench.gpu.report import peers
from trueline.utils.json_types import JSON

ENGINE = "--engine" in sys.argv
"""Time only what the engine takes, not the other ways; processes that are started see it too."""
Calls = list[Callable[[], object]]
Ways = list[tuple[str, Calls]]
Way = TypeVar("Way")


@dataclass(frozen=True)
class Cell:
    kind: str
    key: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.kind:<13}" + " ".join(str(part) for part in self.key)


def asked(ways: Iterable[Way]) -> list[Way]:
    """The engine's own way comes first."""
    return list(ways)[:1] if ENGINE else list(ways)


def graph_time(calls: Sequence[Callable[[], object]], repeat: int = 12) -> float:
    """Microseconds per call: the median over replays of a graph that has every call once. Give
    calls on different inputs, more than the cache holds together."""
    for call in calls[:2]:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(repeat + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times[3:])


def routes(count: int, top: int, tokens: int, calls: int) -> list[Tensor]:
    """Experts of every token, different in every call; where a step takes few, none that the
    last step took."""
    generator = torch.Generator().manual_seed(tokens)
    if tokens * top <= count // 4:
        order = torch.randperm(count, generator=generator).repeat(2 * calls)
        each = order[: calls * tokens * top].view(calls, tokens, top)
    else:
        each = torch.rand(calls, tokens, count, generator=generator).topk(top).indices
    return list(each)


def recorded(op: str, **wanted: object) -> dict[str, float]:
    """Microseconds of each peer that was timed on such a cell."""
    rows: list[JSON] = peers()[op]
    return {row["peer"]: row["us"] for row in rows if wanted.items() <= row.items()}


def last_line(error: BaseException) -> str:
    """Of a compiler's message, the line that names the mistake."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)
