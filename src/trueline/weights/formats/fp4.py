"""fp4, as the routed experts of DeepSeek-V4 are published: two e2m1 numbers in a byte, and a power
of two per row and group of 32 columns, stored as its exponent (e8m0)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
# What the codes mean: bit 3 is the sign.
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fp4Stored:
    """W = the number of its code × 2^(the byte of its row and group - 127). `packed` and `scales`
    both begin at the first column of a group, so that the weight's column c stands at first + c: in
    byte (first + c) // 2, the low nibble if first + c is even, group (first + c) // group."""

    packed: Tensor  # [rows, bytes] uint8
    scales: Tensor  # [rows, groups] uint8, e8m0
    columns: int
    first: int = 0
    """Where the first column stands in the first group: a cut may begin inside of one."""
    group: int = GROUP
    """Columns of one scale: even."""

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.packed), self.columns

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def cut(self, axis: int, start: int, stop: int) -> Fp4Stored:
        if axis == 0:
            return replace(self, packed=self.packed[start:stop], scales=self.scales[start:stop])
        begin, end = self.first + start, self.first + stop
        low, high = begin // self.group, -(-end // self.group)
        return replace(
            self,
            packed=self.packed[:, low * self.group // 2 : -(-end // 2)],
            scales=self.scales[:, low:high],
            columns=stop - start,
            first=begin - low * self.group,
        )

    def dequantise(self) -> Tensor:
        import torch  # `inspect` reads configs with this file, and needs none

        device = self.packed.device
        codes = torch.tensor((*CODES, *(-code for code in CODES)), device=device)
        nibbles = torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(1)
        numbers = codes[nibbles[:, self.first : self.first + self.columns].int()]
        columns = torch.arange(self.first, self.first + self.columns, device=device)
        scales = self.scales.view(torch.float8_e8m0fnu).float()
        return numbers * scales[:, columns // self.group]
