"""docs/mutants.md: a row for each mutant, which a run brings up to date, and the table by area that
follows from the rows. What stands outside of the markers is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mutants.listed import ROOT, Mutant

FILE = ROOT / "docs" / "mutants.md"
START, END = "<!-- made by make mutants -->", "<!-- end of what it made -->"
KILLED, HUNG, CRASHED, SURVIVED = "killed", "killed (hangs)", "killed (crashes)", "**survived**"
OUT_OF_TIME, NOT_RUN = "**out of time**", "**not run**"
DEAD = (KILLED, HUNG, CRASHED)


def outcomes() -> dict[str, tuple[str, str]]:
    """By mutant: what came out, and the test that went red."""
    rows = re.findall(r"^\| `([^`]+)` \|.*\| ([^|]*) \| ([^|]*) \|$", FILE.read_text(), re.M)
    return {name: (outcome, test) for name, outcome, test in rows}


def by_area(mutants: Iterable[Mutant], found: Mapping[str, tuple[str, str]]) -> list[str]:
    rates: dict[str, list[bool]] = {}
    for mutant in mutants:
        outcome = found.get(mutant.id, (NOT_RUN, ""))[0]
        rates.setdefault(mutant.area, []).append(outcome in DEAD)
    every = [dead for area in rates.values() for dead in area]
    return [
        "| area | mutants | killed | |",
        "|---|---:|---:|---:|",
        *(_rate(area, dead) for area, dead in rates.items()),
        _rate("**all**", every),
    ]


def _rate(area: str, dead: list[bool]) -> str:
    return f"| {area} | {len(dead)} | {sum(dead)} | {100 * sum(dead) // max(len(dead), 1)} % |"


def generated(mutants: list[Mutant], found: Mapping[str, tuple[str, str]]) -> str:
    lines = [START, "", *by_area(mutants, found), ""]
    lines += [
        "| mutant | area | what a user would meet | outcome | seen by |",
        "|---|---|---|---|---|",
    ]
    for mutant in mutants:
        outcome, test = found.get(mutant.id, (NOT_RUN, ""))
        lines.append(f"| `{mutant.id}` | {mutant.area} | {mutant.meets} | {outcome} | {test} |")
    return "\n".join([*lines, "", END])


def write(mutants: list[Mutant], found: Mapping[str, tuple[str, str]]) -> None:
    text = FILE.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    FILE.write_text(before + generated(mutants, outcomes() | dict(found)) + after)
