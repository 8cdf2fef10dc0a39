"""Latency and throughput against load, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trueline.client.figures import PointFigures
from trueline.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LoadKind = Literal["concurrency", "rate"]
Time = Literal["ttft_ms", "itl_ms"]
LINES = (("p50", "#7fb3d5", "o"), ("p95", "#2e86c1", "s"), ("p99", "#1b4f72", "^"))
PANELS: tuple[tuple[Time, str], ...] = (
    ("ttft_ms", "time to first token (ms)"),
    ("itl_ms", "between tokens (ms)"),
)
KINDS: tuple[tuple[LoadKind, str], ...] = (
    ("concurrency", "requests at once"),
    ("rate", "requests/s offered"),
)


def plot_points(file: Path, points: list[PointFigures], title: str, output_len: int) -> None:
    """A row for closed loops, a row for open ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a plot needs matplotlib: pip install 'trueline[plot]'") from None
    rows = [(kind, label, found) for kind, label in KINDS if (found := _of_kind(points, kind))]
    if not rows:
        raise UsageError("nothing to draw: no request succeeded")
    figure = Figure(figsize=(11, 0.5 + 3.1 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axes, (kind, label, found) in zip(figure.subplots(len(rows), 3, squeeze=False), rows,
                                          strict=True):  # fmt: skip
        loads = [load for point in found if (load := point["load"][kind]) is not None]
        for panel, (key, name) in zip(axes[:2], PANELS, strict=True):
            _latencies(panel, loads, found, key)
            panel.set_ylabel(name)
        _throughput(axes[2], loads, found, output_len if kind == "rate" else None)
        for panel in axes:
            _dress(panel, loads, label)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _of_kind(points: list[PointFigures], kind: LoadKind) -> list[PointFigures]:
    found = [point for point in points if point["load"][kind] is not None and point["ttft_ms"]]
    return sorted(found, key=lambda point: point["load"][kind] or 0)


def _latencies(panel: Axes, loads: list[float], points: list[PointFigures], key: Time) -> None:
    for name, colour, mark in LINES:
        spreads = [(x, point[key]) for x, point in zip(loads, points, strict=True)]
        there = [(x, spread[name]) for x, spread in spreads if spread]
        panel.plot([x for x, _ in there], [y for _, y in there], color=colour, marker=mark,
                   label=name)  # fmt: skip
    panel.legend(frameon=False, fontsize=8)


def _throughput(
    panel: Axes, loads: list[float], points: list[PointFigures], output_len: int | None
) -> None:
    """Of an open loop beside what was asked: where the two part, the server is full."""
    rates = [point["output_tokens_per_s"] for point in points]
    panel.plot(loads, rates, color="#ca6f1e", marker="o", label="served")
    if output_len is not None:
        offered = [load * output_len for load in loads]
        panel.plot(loads, offered, color="#909497", linestyle="--", label="offered")
        panel.legend(frameon=False, fontsize=8)
    panel.set_ylabel("output tokens/s")


def _dress(panel: Axes, loads: list[float], label: str) -> None:
    panel.set_xlabel(label)
    if len(loads) > 1 and max(loads) / min(loads) > 16:
        panel.set_xscale("log", base=2)
    panel.set_xticks(loads, [f"{load:g}" for load in loads])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
