"""What is told of a write that nobody may have made: where, whose it is, and who ran."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from trueline.errors import CANARY_HIT, EngineBroken

MOST_NAMES = 4
"""Of each sort in the error's words; the file has all."""
MOST_HITS = 1000
"""In the file."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Of a place's bytes, in one layer."""

    layer: int
    part: str
    """Of what the kind keeps: rows, keys, scales, state, …"""
    row: int | None
    """Of the place: a position or an entry of a block, a head of a slot; None: several."""
    byte: int
    """Of the layer's memory of this kind: where the row begins, or the place."""
    num_bytes: int
    """Of a row."""

    def __str__(self) -> str:
        where = f"several of its {self.part}" if self.row is None else f"{self.part}, {self.row}"
        return f"layer {self.layer}, {where} (at byte {self.byte:,})"


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A place that somebody has written who may not, or would."""

    kind: str
    noun: str
    """block or slot."""
    place: int
    change: Change | None
    """None: nothing was written yet, but a step was to."""
    why: str
    """Nobody may write there."""
    clean_step: int
    """After which it still was as it should be."""
    writer: str | None
    """The request that wrote the place last, as it may."""
    holders: list[str]
    """Requests whose tables or slots name it."""
    neighbours: dict[int, list[str]]
    """The same of the places beside it."""
    implementations: dict[str, str]
    """Of the ops that write this kind."""


class RowWrites(msgspec.Struct, frozen=True, kw_only=True):
    """What one row of a step was to write."""

    request: str
    is_decode: bool
    start: int
    count: int
    num_drafts: int
    places: dict[str, list[int]]
    """By pool: blocks or slots."""


class StepWrites(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    graph_rows: int | None
    """Of a captured step: its rows with padding."""
    rows: list[RowWrites]


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    step: int
    """Before whose results the hit was found; steps are counted on each rank from 1."""
    interval: int
    num_hits: int
    hits: list[Hit]
    steps: list[StepWrites]
    """After the first of the hits' clean steps, as far as they are remembered."""
    tables: dict[str, list[list[int]]]
    """Block tables of the requests of these steps, by group, as they were last."""

    def where(self) -> str:
        """In a line; it names no request, for it goes to whoever asked for one."""
        first, more = self.hits[0], self.num_hits - 1
        place = f"{first.kind}, {first.noun} {first.place}"
        place += f", {first.change}" if first.change else ""
        return f"{CANARY_HIT} on rank {self.rank}, after step {self.step}: {place}: {first.why}" + (
            f"; {more} more places were hit" if more else ""
        )

    def words(self) -> str:
        """With who had to do with it, for the log."""
        first = self.hits[0]
        seen: dict[str, str] = {}
        for each in self.steps:
            if each.step > first.clean_step:
                seen |= {r.request: "decode" if r.is_decode else "prefill" for r in each.rows}
        ran = _some([f"{name} ({how})" for name, how in seen.items()])
        by = "".join(f"; written by {op}: {name}" for op, name in first.implementations.items())
        return (
            f"{self.where()}; held by {_some(first.holders) or 'nobody'}, last written by "
            f"{first.writer or 'nobody'}; since step {first.clean_step}, when it was as it should "
            f"be, ran {ran or 'nobody'}{by}"
        )

    def write(self, directory: str | None) -> str:
        """To a file of its own; returns its name, or why there is none."""
        name = f"trueline-canary-{os.getpid()}-rank{self.rank}-step{self.step}.json"
        file = Path(directory or tempfile.gettempdir()) / name
        try:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        except OSError as error:
            return f"none, for {file} cannot be written: {error.strerror}"
        return str(file)


class CanaryHit(EngineBroken):
    def __init__(self, report: CanaryReport) -> None:
        super().__init__(f"{report.where()}; the log names the report")
        self.report = report


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
