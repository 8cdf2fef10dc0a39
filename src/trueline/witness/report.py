"""The figures of `trueline witness` as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueline.witness.run import (
    SETS,
    FaultFigures,
    ModelFigures,
    ProblemSet,
    Share,
    WitnessFigures,
)
from trueline.witness.stories import STORIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_report(console: Console, figures: WitnessFigures) -> None:
    console.print(f"% right, with the 95 % interval; {figures['device']}")
    for model in figures["models"]:
        console.print(_table(model, figures["batch"]))
    for each in figures["unseen"]:
        console.print(
            f"story {each['story']}, {each['model']}: {each['what']}: accuracy cannot show it; "
            f"the check '{each['check']}' does (fault {each['fault']})",
            markup=False,
        )


def _table(model: ModelFigures, batch: int) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{model['model']}, {model['stands_for']}"
    table = Table("", "", *SETS, "", box=box.SIMPLE_HEAD, title=title, title_justify="left")
    right = model["right"]
    alone = [percent(right[name]["alone"]) if name in right else "" for name in SETS]
    together = [percent(right[name]["batch"]) if name in right else "" for name in SETS]
    differing = sum(each["answers_differ"] for each in right.values())
    chances = ", ".join(f"p = {each['p']:.2g}" for each in right.values())
    table.add_row("right", "alone", *alone, "")
    table.add_row(
        "",
        f"in a mixed batch of {batch}",
        *together,
        f"{differing} answers differ from alone; {chances}",
    )
    for story in sorted({fault["story"] for fault in model["faults"]}):
        table.add_section()
        table.add_row(f"story {story}", STORIES[story], *([""] * len(SETS)), "")
        for fault in model["faults"]:
            if fault["story"] == story:
                _add_fault(table, fault)
    return table


def _add_fault(table: Table, fault: FaultFigures) -> None:
    mark = "* " if fault["historical"] else "  "
    name = f"{mark}{fault['what']}" + (" (emulated)" if fault["emulated"] else "")
    if fault["not_covered"] is not None:
        table.add_row("", name, *["not covered"] * len(SETS), fault["not_covered"])
        return
    cells = [_cost(fault, name) for name in SETS]
    stopped = fault["stopped"]
    note = f"the engine stopped: {stopped}" if stopped else "" if fault["acted"] else "DID NOT ACT"
    table.add_row("", name, *cells, note)
    if fault["with_fault_alone"]:
        shares = fault["with_fault_alone"]
        cells = [percent(shares[name]) if name in shares else "" for name in SETS]
        table.add_row("", "    the same, asked alone", *cells, "")


def _cost(fault: FaultFigures, name: ProblemSet) -> str:
    if name not in fault["with_fault"]:
        return ""
    broken = fault["with_fault"][name]
    return f"{percent(broken)}  {points(fault['right'][name], broken):+.0f}"


def points(right: Share, broken: Share) -> float:
    """What a fault costs, in percentage points: below zero."""
    return 100 * (broken["accuracy"] - right["accuracy"])


def percent(share: Share) -> str:
    low, high = share["interval"]
    return f"{100 * share['accuracy']:.0f} ({100 * low:.0f}–{100 * high:.0f})"
