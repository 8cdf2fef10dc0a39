"""Offline beside server, drawn."""

from __future__ import annotations

from pathlib import Path

from trueline.errors import UsageError
from trueline.utils.json_types import JSON

SIDES = (("offline", "offline_tokens_per_s", "#909497"),
         ("through the server", "server_tokens_per_s", "#2e86c1"))  # fmt: skip
WIDTH = 0.38


def plot_rows(file: Path, rows: list[JSON], title: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a plot needs matplotlib: pip install 'trueline[plot]'") from None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for side, (name, key, colour) in enumerate(SIDES):
        places = [place + (side - 0.5) * WIDTH for place in range(len(rows))]
        axes.bar(places, [row[key] for row in rows], WIDTH, color=colour, label=name)
    for place, row in enumerate(rows):
        top = max(row[key] for _, key, _ in SIDES)
        axes.annotate(f"{row['ratio']:.2f}", (place, top), (0, 3), textcoords="offset points",
                      ha="center")  # fmt: skip
    axes.set_xticks(range(len(rows)), [str(row["streams"]) for row in rows])
    axes.set(xlabel="streams at once", ylabel="generated tokens/s", title=title)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
