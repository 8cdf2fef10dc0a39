"""Block fp8, as DeepSeek-V3 is published: float8_e4m3fn numbers and a scale per block of rows and
columns. The blocks at the last edges may be partial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, TypeGuard, TypeVar

from trueline.errors import CheckpointError
from trueline.spec.fields import Fields
from trueline.spec.source import Fact, default
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import PLAIN_DTYPES, Format, Stored, beside, wrong_shape
from trueline.weights.formats.exempt import is_ignored, read_ignored_modules
from trueline.weights.formats.scales import check_scales, groups_of

if TYPE_CHECKING:
    from torch import Tensor


INPUT_GROUP = 128
"""Channels of a token that share a scale where activations are quantised too, whatever the blocks
of the weight are; the last group of a row may be partial."""


@dataclass(frozen=True, slots=True)
class Fp8Stored:
    numbers: Tensor  # [rows, columns] float8_e4m3fn
    scales: Tensor  # [blocks, blocks] float32, those of the blocks that `numbers` touch
    block: tuple[int, int]
    first: tuple[int, int] = (0, 0)
    """Where the first row and column stand in their block: a cut may begin inside of one."""
    powers_of_two: bool = False
    """Whether all scales are: those of quantised activations then are too."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def cut(self, axis: int, start: int, stop: int) -> Fp8Stored:
        block, first = self.block[axis], self.first[axis]
        low, high = (first + start) // block, -(-(first + stop) // block)
        inside = (first + start) % block
        return replace(
            self,
            numbers=self.numbers.narrow(axis, start, stop - start),
            scales=self.scales.narrow(axis, low, high - low),
            first=(inside, self.first[1]) if axis == 0 else (self.first[0], inside),
        )

    def dequantise(self) -> Tensor:
        return dequantise(self.numbers, self.scales, self.first, self.block)


B = TypeVar("B", bound="BlockFp8")


def dequantise(
    numbers: Tensor, scales: Tensor, first: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """number × the scale of its block; `first` is where the first one stands in its block."""
    import torch  # `inspect` reads configs with this file, and needs none

    rows, columns = (
        torch.arange(at, at + size, device=numbers.device)
        for size, at in zip(numbers.shape, first, strict=True)
    )
    return numbers.float() * scales[rows // block[0]][:, columns // block[1]]


@dataclass(frozen=True, kw_only=True)
class BlockFp8(Format):
    """W = weight × weight_scale_inv of its block."""

    label = "block fp8"
    numerics = ("weights", "activations")
    scale_name: ClassVar[str] = "weight_scale_inv"
    """Of the scales, in the module of their weight."""
    scale_dtypes: ClassVar[tuple[str, ...]] = ("F32", "F8_E8M0")

    block: tuple[int, int]
    power_of_two_scales: bool
    ignored_modules: tuple[str, ...]

    @property
    def powers_of_two(self) -> bool:
        """Whether all scales are, by what the config says or by how they are stored."""
        return self.power_of_two_scales or "F32" not in self.scale_dtypes

    def names(self, weight: str) -> tuple[str, ...]:
        return weight, beside(weight, self.scale_name)

    def stored_slices(self, cut: tuple[slice, ...]) -> tuple[tuple[slice, ...], ...]:
        """Scales of all blocks that the numbers touch."""
        return cut, tuple(groups_of(each, size) for each, size in zip(cut, self.block, strict=True))

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        blocks = (-(-size // block) for size, block in zip(shape, self.block, strict=True))
        return prod(shape) + 4 * prod(blocks)

    def exempts(self, weight: str) -> bool:
        return is_ignored(self.ignored_modules, weight)

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        weight, scale = tensors
        if wrong := wrong_shape(weight, shape):
            return wrong
        if weight.dtype != "F8_E4M3":
            return f"{weight}: accepted here: F8_E4M3, {', '.join(PLAIN_DTYPES)}"
        blocks = [-(-size // block) for size, block in zip(shape, self.block, strict=True)]
        if list(scale.shape) != blocks or scale.dtype not in self.scale_dtypes:
            return f"{scale}: accepted: {' or '.join(self.scale_dtypes)} {blocks}"
        return None

    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Stored:
        weight, scales = values[0], values[1].float()
        return Fp8Stored(weight, scales, self.block, powers_of_two=self.powers_of_two)

    def check(self, tensors: Sequence[StoredTensor], stored: Stored) -> None:
        assert isinstance(stored, Fp8Stored)
        if _has_nan(stored.numbers):
            raise CheckpointError(
                f"{tensors[0]}: holds NaN codes (0x7f or 0xff); accepted: numbers"
            )
        check_scales(tensors[1], stored.scales)
        if self.power_of_two_scales and bool((stored.scales.frexp().mantissa != 0.5).any()):
            raise CheckpointError(
                f"{tensors[1]}: scale_fmt is ue8m0, but not all are powers of two"
            )


def _has_nan(numbers: Tensor) -> bool:
    """The codes of NaN are the largest signed and the largest unsigned byte: two reductions, and no
    copy of the weight."""
    import torch

    if not numbers.numel():
        return False
    bytes_ = numbers.view(torch.uint8)
    return bool(bytes_.max() == 0xFF) or bool(bytes_.view(torch.int8).max() == 0x7F)


def read(section: Fields) -> BlockFp8:
    """Of `quantization_config` with quant_method fp8."""
    return read_as(BlockFp8, section)


def read_as(kind: type[B], section: Fields) -> B:
    section.choice("fmt", ("e4m3",), default=default("e4m3", "block fp8 has no other"))
    section.choice(
        "activation_scheme", ("dynamic",), default=default("dynamic", "block fp8 has no other")
    )
    section.must_equal("dequantize", False, "each op decides, and the plan tells")

    def is_side(value: object) -> TypeGuard[int]:
        return type(value) is int and 0 < value <= 65536

    block = section.list_of("weight_block_size", is_side, "block sizes", length=2)
    scale_fmt = section.choice(
        "scale_fmt", ("float32", "ue8m0"), default=default("float32", "plain scales")
    )
    ignored = read_ignored_modules(section)
    section.finish({})
    return kind.of(
        block=block,
        power_of_two_scales=Fact(scale_fmt.value == "ue8m0", scale_fmt.source),
        ignored_modules=ignored,
    )
