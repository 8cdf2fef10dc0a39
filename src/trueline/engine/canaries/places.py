"""Which places of a pool have known contents, and which are to be looked at next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trueline.cache.pool import NULL

TRAPS = 4
"""Places spread over a pool that are looked at in every check, used or not."""
FIXED_SHARE = 4
"""Those, the null place and the last one take at most 1 / this of a check."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Places to look at; positions [first, known) of each have known sums, and those of [first,
    written) are to be taken."""

    places: Tensor
    first: Tensor
    known: Tensor
    written: Tensor
    looked: Tensor
    """The step after which the sums were taken."""

    def __len__(self) -> int:
        return len(self.places)

    def part(self, some: slice) -> Chosen:
        return Chosen(*(getattr(self, item.name)[some] for item in fields(self)))


class Places:
    """Of one pool, on the host. Positions of a place are written from its beginning on: a block's
    are token by token, a slot has one."""

    def __init__(self, count: int, positions: int, most: int, *, scribbled: int) -> None:
        """`most`: that a check may look at. `scribbled`: leading positions of the null place that
        anybody may write at any time."""
        self.count, self.positions, self.most = count, positions, max(most, 1)
        self.first = torch.zeros(count, dtype=torch.long)
        self.first[NULL] = scribbled
        self.known = torch.zeros(count, dtype=torch.long)
        self.written = torch.full((count,), positions)
        """Up to where nobody writes who holds it now; all of what nobody has held."""
        self.writer = torch.full((count,), -1)
        """The request that wrote there last, by its number."""
        self.looked = torch.zeros(count, dtype=torch.long)
        self.touched = torch.zeros(count, dtype=torch.bool)
        """Written since it was looked at."""
        self.poisoned = torch.zeros(count, dtype=torch.bool)
        self.used = 1
        """Places up to the highest that was ever written."""
        step = max((count - 1) // TRAPS, 1)
        fixed = sorted({NULL, count - 1, *range(step, count, step)})
        self._fixed = fixed if len(fixed) <= self.most // FIXED_SHARE else []
        self._next_touched = self._next = 0

    def write(
        self,
        places: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        writers: Sequence[int],
        again: Sequence[bool],
    ) -> None:
        """A step's rows write positions [start, stop) of these. `again`: the next step will too, so
        that it is idle to look at them."""
        if not places:
            return
        at, start = torch.tensor(places), torch.tensor(starts)
        self._lose(at, start)
        self.written[at] = torch.tensor(stops)
        self.writer[at] = torch.tensor(writers)
        self.poisoned[at] = False
        self.touched[at] = ~torch.tensor(again)
        self.used = max(self.used, *(place + 1 for place in places))

    def poison(self, places: Sequence[int]) -> None:
        """The same bytes every time: what was poisoned before keeps them."""
        at = torch.tensor(places, dtype=torch.long)
        fresh = at[~self.poisoned[at]]
        self.known[fresh], self.written[fresh], self.poisoned[fresh] = 0, self.positions, True

    def poison_cells(self, cells: Sequence[int]) -> None:
        at = torch.tensor(cells, dtype=torch.long)
        self._lose(at // self.positions, at % self.positions)

    def _lose(self, places: Tensor, starts: Tensor) -> None:
        """Sums that cover a position from `start` on hold no longer."""
        self.known[places[starts < self.known[places]]] = 0

    def forget(self) -> None:
        self.known[:] = 0

    def choose(self, step: int, *, everything: bool) -> Chosen:
        """After this step: all that is known, or what has its turn."""
        at = self.known.nonzero().flatten() if everything else self._in_turn()
        chosen = Chosen(at, self.first[at], self.known[at], self.written[at], self.looked[at])
        self.known[at], self.looked[at], self.touched[at] = chosen.written, step, False
        return chosen

    def _in_turn(self) -> Tensor:
        """The fixed ones, some of those that have been written since they were looked at, and as
        many of the others, in turn."""
        if self.count <= self.most:
            return torch.arange(self.count)
        half = max((self.most - len(self._fixed)) // 2, 1)
        touched = self.touched.nonzero().flatten()
        touched = touched.roll(-int((touched < self._next_touched).sum()))[:half]
        if len(touched):
            self._next_touched = int(touched[-1]) + 1
        others = max(self.most - len(self._fixed) - len(touched), 1)
        ring = self.used + (self.used < self.count)  # the last place stands behind those in use
        turn = (torch.arange(min(others, ring)) + self._next) % ring
        self._next = int(turn[-1] + 1) % ring
        turn[turn == self.used] = self.count - 1
        wanted = torch.zeros(self.count, dtype=torch.bool)
        wanted[torch.cat((torch.tensor(self._fixed, dtype=torch.long), touched, turn))] = True
        return wanted.nonzero().flatten()
