"""The figures of `trueline witness` as text: a table for each model, readable at 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from trueline.witness.run import (
    SETS,
    FaultFigures,
    ModelFigures,
    ProblemSet,
    Share,
    WitnessFigures,
)
from trueline.witness.stories import STORIES

CELL = 18
"""Columns of a figure: 100 (100–100) -100."""
WIDEST = 100


def report(figures: WitnessFigures, width: int) -> str:
    width = min(width, WIDEST)
    lines = [line for text in _legend(figures) for line in textwrap.wrap(text, width)]
    for model in figures["models"]:
        lines += ["", *_table(model, figures["batch"], width)]
    if figures["unseen"]:
        lines += ["", "Faults that accuracy cannot show, and the check that catches each:"]
    for each in figures["unseen"]:
        text = f"story {each['story']}, {each['model']}: {each['what']}: '{each['check']}'"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _legend(figures: WitnessFigures) -> Iterator[str]:
    yield f"Right answers in %, with their 95 % interval, on {figures['device']}."
    for model in figures["models"][:1]:
        of = {name: each["batch"]["items"] for name, each in model["right"].items()}
        counts = [f"{of['arithmetic']} arithmetic problems of 2 to 5 operations"]
        if "long" in of:
            counts.append(f"{of['long']} long ones of 600 to 850 tokens")
        yield f"Held out from training: {', '.join(counts)}."
    yield (
        "alone: one request at a time. in the batch: all problems, up to "
        f"{figures['batch']} requests at once, of which some are in prefill while others decode."
    )
    yield (
        "Below them: the same batch with a fault switched on in the running engine, and its cost "
        "in percentage points; * marks what a public engine had."
    )


def _table(model: ModelFigures, batch: int, width: int) -> Iterator[str]:
    right = model["right"]
    yield f"{model['model']}, {model['stands_for']}"
    yield from _row("", SETS, width)
    yield "─" * width
    for label, run in (
        ("alone, every second problem", "alone"),
        (f"in the batch of {batch}", "batch"),
    ):
        shares = {name: each[run] for name, each in right.items()}  # type: ignore[literal-required]
        yield from _row(label, _cells(shares), width)
    differing = sum(each["answers_differ"] for each in right.values())
    asked = sum(each["alone"]["items"] for each in right.values())
    chances = ", ".join(f"{each['p']:.2g}" for each in right.values())
    yield from _note(
        f"{differing} of the {asked} answers given alone differ in the batch (McNemar's test: "
        f"p = {chances})",
        width,
    )
    for story in sorted({fault["story"] for fault in model["faults"]}):
        yield ""
        yield from textwrap.wrap(f"story {story}, {STORIES[story]}", width)
        for fault in model["faults"]:
            if fault["story"] == story:
                yield from _fault(fault, width)


def _fault(fault: FaultFigures, width: int) -> Iterator[str]:
    label = fault["what"] + (" (emulated)" if fault["emulated"] else "")
    label = f"{'*' if fault['historical'] else ' '} {label}"
    if fault["not_covered"] is not None:
        yield from _row(label, ("not covered",) * len(SETS), width)
        yield from _note(fault["not_covered"], width)
        return
    yield from _row(label, [_cost(fault, name) for name in SETS], width)
    if fault["with_fault_alone"]:
        yield from _row("  the same fault, asked alone", _cells(fault["with_fault_alone"]), width)
    if fault["stopped"]:
        yield from _note(f"no answer is right: {fault['stopped']}", width)
    elif not fault["acted"]:
        yield from _note("NO EFFECT: the fault was switched on and did not act", width)
    elif not fault["answers_changed"]:
        yield from _note("logprobs changed, and no answer did", width)


def _row(label: str, cells: Sequence[str], width: int) -> Iterator[str]:
    """A label too long for its column goes on below."""
    column = width - CELL * len(cells)
    first, *more = textwrap.wrap(label, column - 1, subsequent_indent="    ") or [""]
    yield (first.ljust(column) + "".join(cell.ljust(CELL) for cell in cells)).rstrip()
    yield from more


def _note(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _cells(shares: dict[ProblemSet, Share]) -> list[str]:
    return [percent(shares[name]) if name in shares else "" for name in SETS]


def _cost(fault: FaultFigures, name: ProblemSet) -> str:
    if name not in fault["with_fault"]:
        return ""
    broken = fault["with_fault"][name]
    return f"{percent(broken)} {points(fault['right'][name], broken):+.0f}"


def points(right: Share, broken: Share) -> float:
    """What a fault costs, in percentage points: below zero."""
    return 100 * (broken["accuracy"] - right["accuracy"])


def percent(share: Share) -> str:
    low, high = share["interval"]
    return f"{100 * share['accuracy']:.0f} ({100 * low:.0f}–{100 * high:.0f})"
