"""docs/verify-mutants.md: what a user's run of verify says of each mutant. What stands outside of
the markers is written by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from mutants.listed import ROOT, Mutant

FILE = ROOT / "docs" / "verify-mutants.md"
START, END = '<!-- made by make mutants OPTIONS="--verify --write-docs" -->', "<!-- end -->"
CAUGHT, CRASHES, HANGS = "caught", "caught (crashes)", "caught (never ends)"
SURVIVED, NOT_REACHED, NEEDS_GPU = "survived", "not reached", "not reached (a GPU's)"
NOT_RUN = "not run"
SEEN = (CAUGHT, CRASHES, HANGS)
UNREACHED = (NOT_REACHED, NEEDS_GPU)


ROOMS = ("spec", "models", "weights", "cache", "native", "ops", "parallel", "plan", "layers",
         "engine", "reference", "device.py", "text")  # fmt: skip
"""What a run of verify on a model may come to."""


def is_in_reach(mutant: Mutant) -> bool:
    """By nature: the server, clients, evaluation, benches and the tools are in no run of verify."""
    return Path(mutant.file).parts[0] in ROOMS


@dataclass(frozen=True)
class Result:
    outcome: str
    models: str
    """Where it was caught, or all that were tried."""
    invariant: str
    check: str

    @property
    def tried(self) -> tuple[str, ...]:
        return tuple(self.models.split("; ")) if self.models else ()

    def cells(self) -> tuple[str, ...]:
        return astuple(self)

    def line(self) -> str:
        return " ".join(filter(None, [self.outcome, self.models and f"({self.models})",
                                      self.invariant, self.check]))  # fmt: skip


def not_reached(mutant: Mutant) -> str:
    text = mutant.path.read_text()
    is_kernel = "import triton" in text or "gluon" in text or "trueline.ops.jit" in text
    return NEEDS_GPU if is_kernel else NOT_REACHED


def headline(mutants: Iterable[Mutant], results: Mapping[str, Result]) -> str:
    return counted(results[m.id].outcome if m.id in results else NOT_RUN for m in mutants)


def counted(outcomes: Iterable[str]) -> str:
    counts = Counter(outcomes)
    seen = sum(counts[each] for each in SEEN)
    missed = sum(counts[each] for each in UNREACHED)
    return (
        f"A user's run would have caught {seen} of {seen + counts[SURVIVED]} mutants that it "
        f"comes to; {missed} it does not come to ({counts[NEEDS_GPU]} of them are kernels of a "
        f"GPU); {counts[NOT_RUN]} were not run"
    )


def by_area(mutants: Iterable[Mutant], results: Mapping[str, Result]) -> list[str]:
    areas: dict[str, Counter[str]] = {}
    for mutant in mutants:
        outcome = results[mutant.id].outcome if mutant.id in results else NOT_RUN
        areas.setdefault(mutant.area, Counter())[outcome] += 1
    return [
        "| area | mutants | caught | survived | not reached | not run |",
        "|---|---:|---:|---:|---:|---:|",
        *(_rate(area, counts) for area, counts in areas.items()),
        _rate("**all**", sum(areas.values(), Counter())),
    ]


def _rate(area: str, counts: Counter[str]) -> str:
    seen, missed = (sum(counts[each] for each in some) for some in (SEEN, UNREACHED))
    return (
        f"| {area} | {counts.total()} | {seen} | {counts[SURVIVED]} | {missed} | "
        f"{counts[NOT_RUN]} |"
    )


def generated(mutants: list[Mutant], results: Mapping[str, Result]) -> str:
    met = [mutant for mutant in mutants if is_in_reach(mutant)]
    lines = [START, "", f"{headline(met, results)}.", "", *by_area(met, results), ""]
    lines += [f"{len(mutants) - len(met)} others are in no run of verify by their nature.", ""]
    lines += ["| mutant | area | what a user would meet | outcome | models | invariant | check |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    none = Result(NOT_RUN, "", "", "")
    for mutant in met:
        cells = results.get(mutant.id, none).cells()
        row = (f"`{mutant.id}`", mutant.area, mutant.meets, *(c.replace("|", "/") for c in cells))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", END])


def read() -> dict[str, Result]:
    """The rows."""
    rows = re.findall(
        r"^\| `([^`]+)` \|[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$",
        FILE.read_text(),
        re.MULTILINE,
    )
    return {name: Result(*cells) for name, *cells in rows}


def write(mutants: list[Mutant], results: Mapping[str, Result]) -> None:
    text = FILE.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    FILE.write_text(before + generated(mutants, _run(read()) | dict(results)) + after)


def _run(rows: Mapping[str, Result]) -> dict[str, Result]:
    return {name: each for name, each in rows.items() if each.outcome != NOT_RUN}
