"""Sums of what places hold, taken and compared where the cache is: nothing waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.parts import Part
from trueline.device import send
from trueline.engine.canaries.places import Chosen

LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A place of a layer whose bytes are not what they were."""

    layer: int
    """Among those that keep it."""
    place: int
    row: int | None
    """None: several rows have changed."""
    positions: tuple[int, int]
    """Of the place, those whose sums were known."""
    clean_step: int
    """After which they were taken."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Some places of one part, on the device."""

    chosen: Chosen
    bad: Tensor  # [layers, places] bool
    off: Tensor  # [3, 2, layers, places] by how much the sums are off


class Sums:
    """Of one part, for each layer and place: its rows' sums added up, and these times the row and
    times its square. By the three, a single row that has changed is known. Of the rows' sums the
    upper and lower halves apart, so that nothing wraps around and the row is a quotient."""

    def __init__(self, part: Part, positions: int) -> None:
        """`positions`: of a place."""
        self.part, self.positions = part, positions
        device = part.words.device
        layers = part.words.shape[0]
        self.kept = torch.zeros(3, 2, layers, part.num_places, dtype=torch.int64, device=device)
        self._rows = torch.arange(part.num_rows, device=device)

    @property
    def place_bytes(self) -> int:
        return self.part.words.shape[0] * self.part.num_rows * self.part.row_bytes

    def compare(self, chosen: Chosen, most_bytes: int) -> Iterator[Compared]:
        """What is known, with what is there now; then that is kept. So many bytes at a time."""
        most = max(most_bytes // self.place_bytes, 1)
        for start in range(0, len(chosen), most):
            yield self._compare(chosen.part(slice(start, start + most)))

    def _compare(self, chosen: Chosen) -> Compared:
        each = self.part.num_rows
        # the first positions that padding may write spoil the whole rows they are in
        rows = (
            chosen.places,
            -(-chosen.first * each // self.positions),
            chosen.known * each // self.positions,
            chosen.written * each // self.positions,
        )
        at, first, known, written = send(torch.stack(rows), self._rows.device)
        sums = self.part.sums(at)
        sums = torch.stack((sums >> 32, sums & LOW))
        was = self._added(sums, first, known)
        off = was - self.kept[..., at]
        bad = (off != 0).flatten(0, 1).any(0) & (known > 0)
        self.kept[..., at] = self._added(sums, first, written)
        return Compared(chosen, bad, off)

    def _added(self, sums: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """[3, 2, layers, places]: over rows [start, stop) of each place."""
        row = self._rows
        inside = (row >= start[:, None]) & (row < stop[:, None])
        return torch.stack([(sums * (inside * row**power)).sum(-1) for power in range(3)])

    def differences(self, compared: Compared) -> list[Difference]:
        """Waits for the device."""
        chosen = compared.chosen
        return [
            Difference(
                layer,
                int(chosen.places[i]),
                _row(*compared.off[..., layer, i].tolist()),
                (int(chosen.first[i]), int(chosen.known[i])),
                int(chosen.looked[i]),
            )
            for layer, i in compared.bad.nonzero().tolist()
        ]


def _row(added: list[int], times_row: list[int], times_square: list[int]) -> int | None:
    """The one whose change alone makes the sums what they are."""
    rows = {b // a for a, b in zip(added, times_row, strict=True) if a and b % a == 0}
    if len(rows) != 1:
        return None
    (row,) = rows
    alone = [[row * a for a in added], [row * row * a for a in added]]
    return row if alone == [times_row, times_square] else None
