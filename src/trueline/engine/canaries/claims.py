"""What a step may write, as its message says: positions of blocks, and slots. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trueline.cache.pool import NULL
from trueline.engine.messages import StepMessage, StepRow


@dataclass(frozen=True, slots=True)
class Claims:
    """Of one pool: positions [start, stop) of places, and the request of each."""

    places: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    """Whether the same request's next step writes it too, from the beginning."""

    def add(self, place: int, start: int, stop: int, writer: int, again: bool) -> None:
        self.places.append(place)
        self.starts.append(start)
        self.stops.append(stop)
        self.writers.append(writer)
        self.again.append(again)

    def of(self, writer: int) -> list[int]:
        return [p for p, w in zip(self.places, self.writers, strict=True) if w == writer]

    def refused(self) -> list[int]:
        """Places that no step may claim, or not twice."""
        return sorted(place for place, n in Counter([NULL, *self.places]).items() if n > 1)


def claimed_blocks(step: StepMessage, group: int, size: int, keeps_ends: bool) -> Claims:
    """By the rows' block tables of this group, whose blocks have `size` positions. `keeps_ends`:
    what nobody reads later is written to the null block."""
    claims = Claims()
    for row in step.rows:
        table, start = row.tables[group], row.start
        stop = start + len(row.token_ids)
        for i in range(start // size, (stop - 1) // size + 1):
            first = i * size
            if keeps_ends and table[i] == NULL:
                continue
            claims.add(table[i], max(start - first, 0), min(stop - first, size), row.id, False)
    return claims


def claimed_slots(step: StepMessage) -> Claims:
    claims = Claims()
    for row in step.rows:
        assert row.state is not None, "the scheduler gives every row a slot"
        for slot in (row.state.slot, *row.state.drafts):
            claims.add(slot, 0, 1, row.id, True)
        for _, slot in row.state.snapshots:
            claims.add(slot, 0, 1, row.id, False)
    return claims


def named_slots(row: StepRow) -> Sequence[int]:
    """That a request reads or writes."""
    state = row.state
    if state is None:
        return ()
    source = () if state.source is None else (state.source,)
    return (state.slot, *source, *state.drafts, *(slot for _, slot in state.snapshots))
