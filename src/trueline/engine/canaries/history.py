"""Who ran in the last steps, and what they were to write: what a report names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from trueline.engine.canaries.claims import Claims, named_slots
from trueline.engine.canaries.report import RowWrites, StepWrites
from trueline.engine.messages import Admission, StepMessage, StepRow

MOST_STEPS = 128
"""That are remembered."""


@dataclass(slots=True)
class Note:
    """A step, without its tables: they may be long."""

    number: int
    rows: list[tuple[int, bool, int, int, int]]
    """(request, whether it decodes, start, count, drafts)."""
    claims: Mapping[str, Claims]
    """By pool."""
    graph_rows: int | None = None


class History:
    def __init__(self) -> None:
        self._notes: deque[Note] = deque()
        self._names: dict[int, str] = {}
        self._latest: dict[int, StepRow] = {}
        self._ended: deque[tuple[int, int]] = deque()

    def admit(self, admission: Admission) -> None:
        self._names[admission.id] = admission.request_id

    def add(self, number: int, step: StepMessage, claims: Mapping[str, Claims]) -> None:
        rows = [
            (row.id, row.is_decode, row.start, len(row.token_ids), row.num_drafts)
            for row in step.rows
        ]
        self._notes.append(Note(number, rows, claims))
        self._latest.update((row.id, row) for row in step.rows)
        self._ended.extend((number, request) for request in step.ended)
        if len(self._notes) > MOST_STEPS:
            self._notes.popleft()
        while self._ended and self._ended[0][0] < self._notes[0].number:
            _, request = self._ended.popleft()
            self._names.pop(request, None)
            self._latest.pop(request, None)

    def captured(self, graph_rows: int | None) -> None:
        """How the latest step was run."""
        self._notes[-1].graph_rows = graph_rows

    def name(self, request: int) -> str:
        return self._names.get(request) or f"number {request}"

    def holders(self, group: int | None, place: int) -> list[str]:
        """Requests whose latest row names it; `group`: of its block table, None for slots."""
        ended = {request for _, request in self._ended}
        return [
            self.name(request) + (" (ended)" if request in ended else "")
            for request, row in self._latest.items()
            if place in (named_slots(row) if group is None else row.tables[group])
        ]

    def steps(self, numbers: range) -> list[StepWrites]:
        return [
            StepWrites(
                step=note.number,
                graph_rows=note.graph_rows,
                rows=[
                    RowWrites(
                        request=self.name(request),
                        is_decode=is_decode,
                        start=start,
                        count=count,
                        num_drafts=drafts,
                        places={pool: each.of(request) for pool, each in note.claims.items()},
                    )
                    for request, is_decode, start, count, drafts in note.rows
                ],
            )
            for note in self._notes
            if note.number in numbers
        ]

    def tables(self, numbers: range) -> dict[str, list[list[int]]]:
        """Of requests that have run in these steps."""
        notes = [note for note in self._notes if note.number in numbers]
        ran = dict.fromkeys(row[0] for note in notes for row in note.rows)
        return {
            self.name(request): self._tables(request) for request in ran if request in self._latest
        }

    def _tables(self, request: int) -> list[list[int]]:
        return [list(table) for table in self._latest[request].tables]

    def writer(self, request: int) -> str | None:
        return None if request < 0 else self.name(request)
