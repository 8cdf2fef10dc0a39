"""The memory of the paged latent cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES, dequantise, fp8_scales, in_groups, join
from trueline.cache.layout import LatentFp8, LatentLayout
from trueline.cache.parts import Part


@dataclass(frozen=True, slots=True)
class LatentView:
    """One layer's rows. `zero_cell` is a row of zeros that nobody owns and nobody writes: masked
    positions point at it, so that no byte of a stranger is ever read, not even times zero."""

    rows: Tensor  # [cells + 1, width]; in fp8 [cells + 1, bytes of a row]
    layout: LatentLayout
    zero_cell: int

    @property
    def dtype(self) -> torch.dtype:
        """Of computation: what is read."""
        return DTYPES[self.layout.fp8.rope] if self.layout.fp8 else self.rows.dtype

    def write(self, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        fp8 = self.layout.fp8
        if fp8 is not None:
            new = self._quantised(latent.to(self.dtype).float(), rope.to(self.dtype), fp8)
        else:
            new = torch.cat((latent, rope), dim=-1).to(self.rows.dtype)
        # not rows[cells] = …, which wakes every thread for a handful of rows
        self.rows.index_copy_(0, cells, new)

    def scratch(self, count: int) -> tuple[LatentView, Tensor]:
        """As many rows that are no part of the cache, as they are computed, and their cells."""
        layout, device = replace(self.layout, fp8=None), self.rows.device
        rows = torch.zeros(count + 1, layout.width, dtype=self.dtype, device=device)
        return LatentView(rows, layout, count), torch.arange(count, device=device)

    def gather(self, cells: Tensor) -> Tensor:
        """Rows at cells [..., n] -> [..., n, width], in the order asked for."""
        flat = torch.index_select(self.rows, 0, cells.reshape(-1))
        if self.layout.fp8 is not None:
            codes, scales, rope = fp8_parts(flat, self.layout)
            groups = in_groups(codes.float(), self._group(self.layout.fp8))
            latent = join(dequantise(groups, scales), self.layout.latent)
            flat = torch.cat((latent.to(self.dtype), rope), dim=-1)
        return flat.view(*cells.shape, self.layout.width)

    def _quantised(self, latent: Tensor, rope: Tensor, fp8: LatentFp8) -> Tensor:
        """The bytes of rows [n, bytes of a row]."""
        rows = self.rows.new_zeros(len(latent), self.rows.shape[1])
        codes, scales, keys = fp8_parts(rows, self.layout)
        groups = in_groups(latent, self._group(fp8))
        wanted = fp8_scales(groups, fp8.variant, fp8.power_of_two)
        codes.copy_(join(groups / wanted[..., None], self.layout.latent).to(codes.dtype))
        scales.copy_(wanted)
        keys.copy_(rope)
        return rows

    def _group(self, fp8: LatentFp8) -> int:
        return min(fp8.group, self.layout.latent)


def fp8_parts(rows: Tensor, layout: LatentLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Of bytes [..., bytes of a row]: codes, scales and rotated key where they lie."""
    assert layout.fp8 is not None
    codes, rope = DTYPES[layout.fp8.storage], DTYPES[layout.fp8.rope]
    key_bytes = layout.rope * rope.itemsize
    return (
        rows[..., : layout.latent].view(codes),
        rows[..., layout.scales_start : layout.rope_start].view(torch.float32),
        rows[..., layout.rope_start : layout.rope_start + key_bytes].view(rope),
    )


class LatentStore:
    """All layers' rows, allocated once."""

    def __init__(
        self, layout: LatentLayout, num_layers: int, num_blocks: int, dtype: torch.dtype
    ) -> None:
        cells = num_blocks * layout.block_size
        self.layout = layout
        # Not cleared: nobody reads a row that its owner has not written, and untouched memory
        # costs nothing.
        if layout.fp8 is None:
            self.rows = torch.empty(num_layers, cells + 1, layout.width, dtype=dtype)
        else:
            row = layout.row_bytes(dtype.itemsize)
            self.rows = torch.empty(num_layers, cells + 1, row, dtype=torch.uint8)
        self.rows[:, cells] = 0
        self.views = [LatentView(rows, layout, cells) for rows in self.rows]

    @staticmethod
    def block_bytes(layout: LatentLayout, num_layers: int, dtype: torch.dtype) -> int:
        return num_layers * layout.block_size * layout.row_bytes(dtype.itemsize)

    def parts(self) -> list[Part]:
        size, cells = self.layout.block_size, self.rows.shape[1] - 1
        rows = self.rows[:, :cells].view(len(self.rows), -1, size, self.rows.shape[2])
        zeros = self.rows[:, None, cells:]
        return [
            Part.rows("rows", rows, self.rows),
            Part.rows("row of zeros", zeros, self.rows, constant=True),
        ]

    def randomise(self, blocks: Sequence[int]) -> None:
        size = self.layout.block_size
        for block in blocks:
            cells = slice(block * size, (block + 1) * size)
            if self.layout.fp8 is None:
                self.rows[:, cells].normal_()
                continue
            for view in self.views:
                at = torch.arange(cells.start, cells.stop, device=self.rows.device)
                drawn = torch.randn(size, self.layout.width, device=self.rows.device)
                view.write(at, drawn[:, : self.layout.latent], drawn[:, self.layout.latent :])

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks that nobody owns with NaN: a read of them shows in the results."""
        size = self.layout.block_size
        starts = torch.tensor(list(blocks), dtype=torch.long)[:, None] * size
        self._poison((starts + torch.arange(size)).flatten())

    def poison_cells(self, cells: list[int]) -> None:
        """The same for single rows: the unused tail of a block."""
        self._poison(cells)

    def _poison(self, cells: Tensor | list[int]) -> None:
        """What is read there is no number: in fp8 by its code, by its scale, and by its key."""
        if self.layout.fp8 is None:
            self.rows[:, cells] = torch.nan
            return
        row = self.rows.new_zeros(self.rows.shape[2])
        codes, scales, rope = fp8_parts(row, self.layout)
        codes.view(torch.uint8).fill_(self.layout.fp8.variant.nan)
        scales.fill_(torch.nan)
        rope.fill_(torch.nan)
        self.rows[:, cells] = row
