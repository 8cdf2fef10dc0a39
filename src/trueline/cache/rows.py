"""The rows of a step, as state kinds read them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.cache.slots import StateSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Positions [start, start + count) of a request, and where it keeps what it computes."""

    id: int
    tokens: slice
    """Where they stand among the step's tokens."""
    start: int
    tables: list[list[int]]
    """Its block tables, by group."""
    is_decode: bool
    """One known token, and drafts after it."""
    state: StateSlots | None = None

    @property
    def count(self) -> int:
        stop: int = self.tokens.stop
        return stop - int(self.tokens.start)

    def num_seeing(self, most: int | None) -> int:
        """Of its tokens, the leading ones that see at most so many positions."""
        return self.count if most is None else min(max(most - self.start, 0), self.count)
