"""Decode tokens per second against context, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.context import ContextFigures

LINES = (("#1b6ca8", "o-"), ("#ca6f1e", "s--"), ("#6c757d", "^:"), ("#8e44ad", "v-."))


def plot_contexts(file: Path, series: Mapping[str, list[ContextFigures]], title: str) -> None:
    """On white, whatever the page has behind it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a plot needs matplotlib: pip install 'trueline[plot]'") from None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, figures) in enumerate(series.items()):
        colour, style = LINES[i % len(LINES)]
        contexts, rates = [f.context for f in figures], [f.tokens_per_s for f in figures]
        axes.plot(contexts, rates, style, color=colour, label=name)
    ticks = [f.context for f in next(iter(series.values()))]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="context (tokens)", ylabel="decode tokens/s", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
