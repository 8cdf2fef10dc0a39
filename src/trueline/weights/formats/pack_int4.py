"""int4 packs, as Kimi-K2-Thinking and K2.5 are published (compressed-tensors, `pack-quantized`):
eight numbers of four bits in an int32 word, and a scale per row and group of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8  # numbers in an int32


@dataclass(frozen=True, slots=True)
class Int4Stored:
    """W = (nibble - 8) × the scale of its row and group. `packed` and `scales` both begin at the
    first column of a group, so that the weight's column c stands at first + c: in word
    (first + c) // 8, nibble (first + c) % 8 (bits 4n to 4n + 3), group (first + c) // group."""

    packed: Tensor  # [rows, words] int32
    scales: Tensor  # [rows, groups], as stored: bfloat16, float16 or float32
    group: int
    """Columns of one scale: a multiple of 8."""
    columns: int
    first: int = 0
    """Where the first column stands in the first group: a cut may begin inside of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.packed), self.columns

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def cut(self, axis: int, start: int, stop: int) -> Int4Stored:
        if axis == 0:
            return replace(self, packed=self.packed[start:stop], scales=self.scales[start:stop])
        begin, end = self.first + start, self.first + stop
        low, high = begin // self.group, -(-end // self.group)
        word = low * self.group // WORD
        return replace(
            self,
            packed=self.packed[:, word : -(-end // WORD)],
            scales=self.scales[:, low:high],
            columns=stop - start,
            first=begin - low * self.group,
        )

    def dequantise(self) -> Tensor:
        import torch  # `inspect` reads configs with this file, and needs none

        device = self.packed.device
        bits = torch.arange(0, 4 * WORD, 4, dtype=torch.int32, device=device)
        nibbles = (self.packed[:, :, None] >> bits) & 15
        numbers = nibbles.flatten(1)[:, self.first : self.first + self.columns] - 8
        columns = torch.arange(self.first, self.first + self.columns, device=device)
        return numbers.float() * self.scales.float()[:, columns // self.group]
