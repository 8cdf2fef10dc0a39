"""The memory of the indexer's keys: bytes, at the addresses that the layout gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES, dequantise, fp8_scales
from trueline.cache.layout import SCALE_BYTES, IndexLayout
from trueline.cache.parts import Part


@dataclass(frozen=True, slots=True)
class IndexView:
    """One layer's keys."""

    bytes: Tensor  # [blocks * bytes of a block]
    layout: IndexLayout
    offsets: Tensor  # [dim] from a key's start to each of its numbers

    def write(self, cells: Tensor, keys: Tensor) -> None:
        """keys [n, dim], of any float dtype and stride, rounded to what is stored."""
        dtype = DTYPES[self.layout.storage]
        if self.layout.fp8:
            keys = keys.float()
            scales = fp8_scales(keys, self.layout.fp8, self.layout.power_of_two)
            self._write_scales(cells, scales)
            keys = keys / scales[:, None]
        self._numbers()[self._at(cells)] = self._unit(keys.to(dtype).contiguous())

    def read(self, cells: Tensor) -> Tensor:
        """Keys at cells [n] -> float32 [n, dim]."""
        dtype = DTYPES[self.layout.storage]
        numbers = self._numbers().take(self._at(cells)).view(dtype).float()
        if self.layout.fp8 is None:
            return numbers
        return dequantise(numbers, self.scales(cells))

    def scales(self, cells: Tensor) -> Tensor:
        """float32 [n] of fp8 keys."""
        raw = self.bytes.take(self._scales_at(cells))
        return raw.view(torch.float32)[:, 0]

    def poison(self, cells: Tensor) -> None:
        """What is read at these cells is no number, by its bytes and by its scale."""
        fp8 = self.layout.fp8
        self._numbers()[self._at(cells)] = fp8.nan if fp8 else torch.nan
        if fp8:
            self._write_scales(cells, torch.full_like(cells, torch.nan, dtype=torch.float32))

    def _numbers(self) -> Tensor:
        """The bytes as what a key is a run of; fp8 as bytes, which every torch can index."""
        return self._unit(self.bytes)

    def _unit(self, x: Tensor) -> Tensor:
        return x.view(torch.uint8 if self.layout.fp8 else DTYPES[self.layout.storage])

    def _at(self, cells: Tensor) -> Tensor:
        starts: Tensor = self.layout.key_start(cells)
        return (starts[:, None] + self.offsets) // self.layout.itemsize

    def _scales_at(self, cells: Tensor) -> Tensor:
        starts: Tensor = self.layout.scale_start(cells)
        return starts[:, None] + torch.arange(SCALE_BYTES, device=starts.device)

    def _write_scales(self, cells: Tensor, scales: Tensor) -> None:
        self.bytes[self._scales_at(cells)] = scales[:, None].contiguous().view(torch.uint8)


class IndexStore:
    """The keys of all layers with an indexer of their own, allocated once."""

    def __init__(self, layout: IndexLayout, num_layers: int, num_blocks: int) -> None:
        self.layout = layout
        # Not cleared: nobody reads a key that its owner has not written.
        size = num_blocks * layout.block_bytes
        self.bytes = torch.empty(num_layers, size, dtype=torch.uint8)
        offsets = layout.key_offset(torch.arange(layout.dim) * layout.itemsize)
        self.views = [IndexView(layer, layout, offsets) for layer in self.bytes]

    @staticmethod
    def block_bytes(layout: IndexLayout, num_layers: int) -> int:
        return num_layers * layout.block_bytes

    def parts(self) -> list[Part]:
        """Strides are distances between the layout's addresses."""
        layout, memory = self.layout, self.bytes
        together, (run, distance) = layout.side_by_side, layout.run
        keys = memory.as_strided(
            (
                *(len(memory), memory.shape[1] // layout.block_bytes),
                *(layout.block_size // together, together, layout.key_bytes // run, run),
            ),
            (
                *(memory.stride(0), layout.block_bytes),
                *(layout.key_start(together), layout.key_start(1), distance, 1),
            ),
        )
        found = [Part.of("keys", keys, memory)]
        if layout.fp8:
            first = layout.scale_start(0)
            scales = memory.as_strided(
                (*keys.shape[:2], layout.block_size, SCALE_BYTES),
                (*keys.stride()[:2], layout.scale_start(1) - first, 1),
                first,
            )
            found.append(Part.rows("scales", scales, memory))
        return found

    def randomise(self, blocks: Sequence[int]) -> None:
        device = self.bytes.device
        cells = torch.tensor(self._cells(blocks), dtype=torch.long, device=device)
        for view in self.views:
            view.write(cells, torch.randn(len(cells), self.layout.dim, device=device))

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks that nobody owns with NaN: a read of them shows in the results."""
        self.poison_cells(self._cells(blocks))

    def _cells(self, blocks: Iterable[int]) -> list[int]:
        size = self.layout.block_size
        return [cell for b in blocks for cell in range(b * size, (b + 1) * size)]

    def poison_cells(self, cells: list[int]) -> None:
        """The same for single keys: the unused tail of a block."""
        for view in self.views:
            view.poison(torch.tensor(cells, dtype=torch.long, device=self.bytes.device))
