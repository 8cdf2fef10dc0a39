"""Decode against context, drawn: tokens per second, or the processor time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.context import ContextFigures

LINES = (("#1b6ca8", "o-"), ("#ca6f1e", "s--"), ("#6c757d", "^:"), ("#8e44ad", "v-."))


def plot_contexts(
    file: Path, series: Mapping[str, list[ContextFigures]], title: str, *, cpu: bool = False
) -> None:
    """On white, whatever the page has behind it. `cpu`: ms of a step, both axes logarithmic, so
    that what grows with the context is a straight line; dotted, the part inside attention."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a plot needs matplotlib: pip install 'trueline[plot]'") from None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, figures) in enumerate(series.items()):
        colour, style = LINES[i % len(LINES)]
        contexts = [f.context for f in figures]
        values = [f.cpu_ms if cpu else f.tokens_per_s for f in figures]
        axes.plot(contexts, values, style, color=colour, label=name)
        if cpu:
            axes.plot(contexts, [f.attention_cpu_ms for f in figures], ":", color=colour, lw=1)
    ticks = [f.context for f in next(iter(series.values()))]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    unit = "ms of processor time a decode step" if cpu else "decode tokens/s"
    axes.set(xlabel="context (tokens)", ylabel=unit, title=title)
    if cpu:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
