"""The memory of the paged latent cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout


@dataclass(frozen=True, slots=True)
class LatentView:
    """One layer's rows. `zero_cell` is a row of zeros that nobody owns and nobody writes: masked
    positions point at it, so that no byte of a stranger is ever read, not even times zero."""

    rows: Tensor  # [cells + 1, width]
    layout: LatentLayout
    zero_cell: int

    def write(self, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        # not rows[cells] = …, which wakes every thread for a handful of rows
        new = torch.cat((latent, rope), dim=-1).to(self.rows.dtype)
        self.rows.index_copy_(0, cells, new)

    def gather(self, cells: Tensor) -> Tensor:
        """Rows at cells [..., n] -> [..., n, width], in the order asked for."""
        flat = torch.index_select(self.rows, 0, cells.reshape(-1))
        return flat.view(*cells.shape, self.layout.width)


class LatentStore:
    """All layers' rows, allocated once."""

    def __init__(
        self, layout: LatentLayout, num_layers: int, num_blocks: int, dtype: torch.dtype
    ) -> None:
        cells = num_blocks * layout.block_size
        self.layout = layout
        # Not cleared: nobody reads a row that its owner has not written, and untouched memory
        # costs nothing.
        self.rows = torch.empty(num_layers, cells + 1, layout.width, dtype=dtype)
        self.rows[:, cells] = 0
        self.views = [LatentView(rows, layout, cells) for rows in self.rows]

    @staticmethod
    def block_bytes(layout: LatentLayout, num_layers: int, dtype: torch.dtype) -> int:
        return num_layers * layout.block_size * layout.width * dtype.itemsize

    def randomise(self, blocks: Sequence[int]) -> None:
        size = self.layout.block_size
        for block in blocks:
            self.rows[:, block * size : (block + 1) * size].normal_()

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks that nobody owns with NaN: a read of them shows in the results."""
        size = self.layout.block_size
        for block in blocks:
            self.rows[:, block * size : (block + 1) * size] = torch.nan

    def poison_cells(self, cells: list[int]) -> None:
        """The same for single rows: the unused tail of a block."""
        self.rows[:, cells] = torch.nan
