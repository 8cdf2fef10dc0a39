"""Slots of the state cache: each holds the state of one sequence after some number of its tokens.

A slot with a hash is a *snapshot*: the state after the last token of the block with that hash. See
pool.py for a slot's life, engine/states.py for who takes one and when.
"""

from __future__ import annotations

from typing import Final

from trueline.cache.pool import NULL, Pool

NULL_SLOT: Final = NULL


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
