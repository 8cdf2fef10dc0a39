"""fp4, as the routed experts of DeepSeek-V4 are published: two e2m1 numbers in a byte, and a power
of two per row and group of 32 columns, stored as its exponent (e8m0)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trueline.errors import CheckpointError
from trueline.spec.fields import Fields
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import Format, Storage, Stored, beside
from trueline.weights.formats.block_fp8 import BlockFp8, read_as
from trueline.weights.formats.exempt import is_ignored
from trueline.weights.formats.scales import groups_of, times_groups

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
# What the codes mean: bit 3 is the sign.
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_SCALE = 252  # 6 × 2^(252 - 127) is the last that float32 holds; 255 is NaN
DTYPES = ("I8", "U8")
ROUTED = re.compile(r"\.experts\.\d+\.")


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

        codes = torch.tensor((*CODES, *(-code for code in CODES)), device=self.packed.device)
        pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), dim=1)
        numbers = torch.nn.functional.embedding(self.packed.int(), pairs)  # of each byte
        scales = self.scales.view(torch.float8_e8m0fnu).float()
        scaled = times_groups(numbers.flatten(1), scales, self.group)
        return scaled[:, self.first : self.first + self.columns]


@dataclass(frozen=True, kw_only=True)
class Fp4(Format):
    """W = the number of its code × the scale of its row and group."""

    label = "fp4"

    ignored_modules: tuple[str, ...]

    def names(self, weight: str) -> tuple[str, ...]:
        return weight, beside(weight, "scale")

    def stored_slices(self, cut: tuple[slice, ...]) -> tuple[tuple[slice, ...], ...]:
        """Bytes from the first one of a group on, as `Fp4Stored` has them."""
        rows, columns = cut
        groups = groups_of(columns, GROUP)
        packed = slice(groups.start * GROUP // 2, -(-columns.stop // 2))
        return (rows, packed), (rows, groups)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        return rows * (-(-columns // 2) + -(-columns // GROUP))

    def exempts(self, weight: str) -> bool:
        return is_ignored(self.ignored_modules, weight)

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        packed, scale = tensors
        rows, columns = shape
        if columns % GROUP:
            return f"{packed}: {columns} columns are not whole groups of {GROUP}"
        bytes_, groups = [rows, columns // 2], [rows, columns // GROUP]
        if packed.dtype == "F8_E4M3":
            return f"{packed}: fp8, while config.json says expert_dtype fp4"
        if list(packed.shape) != bytes_ or packed.dtype not in DTYPES:
            return f"{packed}: accepted: {' or '.join(DTYPES)} {bytes_}, two numbers in a byte"
        if list(scale.shape) != groups or scale.dtype != "F8_E8M0":
            return f"{scale}: accepted: F8_E8M0 {groups}"
        return None

    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Stored:
        import torch

        packed, scales = (value.view(torch.uint8) for value in values)
        if scales.numel() and int(scales.max()) > LARGEST_SCALE:
            raise CheckpointError(
                f"{tensors[1]}: holds {int(scales.max())}; accepted: 0 to {LARGEST_SCALE}, so that "
                "every number is finite in float32"
            )
        return Fp4Stored(packed, scales, columns=2 * packed.shape[1])


@dataclass(frozen=True, kw_only=True)
class E8m0BlockFp8(BlockFp8):
    """Block fp8 beside fp4: its scales are e8m0, and have DeepSeek-V4's name."""

    scale_name = "scale"
    scale_dtypes = ("F8_E8M0",)


@dataclass(frozen=True, kw_only=True)
class Fp4Experts(Storage):
    """Routed experts in fp4, all other quantised matrices in block fp8. DeepSeek-V4 is published
    so; for the families that run today it is our own combination."""

    label = "fp4 experts, block fp8"

    routed: Fp4
    others: E8m0BlockFp8

    @property
    def formats(self) -> tuple[Format, ...]:
        return self.routed, self.others

    def format_of(self, weight: str) -> Format:
        return self.routed if ROUTED.search(weight) else self.others


def read(section: Fields) -> Fp4Experts:
    """Of `quantization_config` with quant_method fp8 where expert_dtype is fp4."""
    others = read_as(E8m0BlockFp8, section)
    ignored = {"ignored_modules": others.sources["ignored_modules"]}
    routed = Fp4(ignored_modules=others.ignored_modules, sources=ignored)
    return Fp4Experts(routed=routed, others=others)
