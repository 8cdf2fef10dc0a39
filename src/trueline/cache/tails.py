"""The memory of compressors: what they keep of each position until its windows are complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueline.cache.layout import cells
from trueline.cache.parts import Part


@dataclass(frozen=True, slots=True)
class TailLayout:
    """A row per position, float32: the value u, then the score z with its place's bias, `width`
    numbers each. A compressor makes an entry of `dim` numbers of every `ratio` positions; with
    `overlap` the first half of a row goes into the entry of the next window, the second half into
    that of its own."""

    dim: int
    ratio: int
    overlap: bool
    block_size: int

    @property
    def width(self) -> int:
        return self.dim * (2 if self.overlap else 1)

    @property
    def slots(self) -> int:
        """Positions that an entry is made of: the last that the group of blocks must keep."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def row_bytes(self) -> int:
        return 2 * self.width * torch.float32.itemsize

    def cell(self, block_id: Any, position: Any) -> Any:
        """Of one position, or of a tensor of them."""
        return block_id * self.block_size + position % self.block_size

    def cells(self, block_ids: list[int], start: int, stop: int) -> list[int]:
        return cells(self.block_size, block_ids, start, stop)


@dataclass(frozen=True, slots=True)
class TailView:
    """One layer's rows."""

    rows: Tensor  # [cells, 2, width] float32
    layout: TailLayout

    def write(self, at: Tensor, rows: Tensor) -> None:
        """rows [n, 2, width]; the bias is in z already."""
        self.rows.index_copy_(0, at, rows)


class TailStore:
    """All layers' rows, allocated once."""

    def __init__(self, layout: TailLayout, num_layers: int, num_blocks: int) -> None:
        self.layout = layout
        # Not cleared: nobody reads a row that its owner has not written.
        shape = (num_layers, num_blocks * layout.block_size, 2, layout.width)
        self.rows = torch.empty(shape, dtype=torch.float32)
        self.views = [TailView(rows, layout) for rows in self.rows]

    @staticmethod
    def block_bytes(layout: TailLayout, num_layers: int) -> int:
        return num_layers * layout.block_size * layout.row_bytes

    def parts(self) -> list[Part]:
        rows = self.rows.view(len(self.rows), -1, self.layout.block_size, 2, self.layout.width)
        return [Part.rows("rows", rows, self.rows)]

    def randomise(self, blocks: Sequence[int]) -> None:
        size = self.layout.block_size
        for block in blocks:
            self.rows[:, block * size : (block + 1) * size].normal_()

    def poison(self, blocks: Iterable[int]) -> None:
        """NaN in blocks that nobody owns: a read of them shows in the results."""
        size = self.layout.block_size
        self.poison_cells([at for b in blocks for at in range(b * size, (b + 1) * size)])

    def poison_cells(self, at: list[int]) -> None:
        """The same for single rows: the unused tail of a block."""
        self.rows[:, at] = torch.nan
