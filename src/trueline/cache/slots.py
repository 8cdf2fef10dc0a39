"""Slots of the state cache: each holds the state of one sequence after some number of its tokens.

A slot with a hash is a *snapshot*: the state after the last token of the block with that hash. See
pool.py for a slot's life, engine/states.py for who takes one and when.
"""

from __future__ import annotations

from typing import Final

import msgspec

from trueline.cache.pool import NULL, Pool

NULL_SLOT: Final = NULL


class StateSlots(msgspec.Struct, frozen=True):
    """Slots of one row of a step, for models that keep a state per sequence. Within a step nobody
    else reads or writes what a row writes."""

    slot: int
    """The request's own: the state after the row's last token goes there."""
    source: int | None
    """Where the state before the row's first token is. None: there is none, start from zeros;
    exactly the rows with start 0. Otherwise `slot` itself, or a snapshot, not to be written."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(p, slot), p growing, start < p <= start + count: the state after the request's first p
    tokens goes to that slot as well."""
    drafts: tuple[int, ...] = ()
    """Of a row with k drafts: the slots of the states after its first 1, ..., k tokens, to go on
    from the last that is accepted."""


class SlotPool(Pool):
    """`num_slots` slots, the null slot included."""

    noun = "slot"

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.num_slots = num_slots
        self.num_skipped = 0
        """Snapshots not taken because no slot was free."""

    @property
    def num_in_use(self) -> int:
        """Slots that somebody holds."""
        return self.num_usable - self.num_free

    @property
    def num_snapshots(self) -> int:
        """Snapshots that a request could start from."""
        return len(self._hash_of)
