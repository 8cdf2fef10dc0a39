"""The format: `weight` int8 [rows, columns] and `weight_scale` float32 [rows], a number being its
int8 × the scale of its row. This file is all that Trueline needs to load such a checkpoint.

torch is imported for its type only: `trueline inspect` reads configs and headers without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueline.errors import CheckpointError
from trueline.spec.fields import Fields
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import Format, wrong_shape

if TYPE_CHECKING:
    from torch import Tensor

api_version = 5


def read(section: Fields) -> Int8:
    """Of `quantization_config`, whose quant_method has been read. It has no other keys."""
    section.finish({})
    return Int8.of()


@dataclass(frozen=True, slots=True)
class Int8Stored:
    """A matrix, or some rows and columns of one."""

    numbers: Tensor  # [rows, columns] int8
    scales: Tensor  # [rows] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def cut(self, axis: int, start: int, stop: int) -> Int8Stored:
        numbers = self.numbers.narrow(axis, start, stop - start)
        # All columns of a row have one scale.
        scales = self.scales[start:stop] if axis == 0 else self.scales
        return Int8Stored(numbers, scales)

    def dequantise(self) -> Tensor:
        return self.numbers.float() * self.scales[:, None]


@dataclass(frozen=True, kw_only=True)
class Int8(Format):
    label = "int8 per row"

    def names(self, weight: str) -> tuple[str, ...]:
        return weight, f"{weight}_scale"

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        weight, scale = tensors
        if wrong := wrong_shape(weight, shape):
            return wrong
        if weight.dtype != "I8":
            return f"{weight}: accepted here: I8"
        if scale.dtype != "F32" or scale.shape != shape[:1]:
            return f"{scale}: accepted: F32 {list(shape[:1])}"
        return None

    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Int8Stored:
        weight, scales = values
        if not bool(scales.isfinite().all()) or bool((scales <= 0).any()):
            raise CheckpointError(f"{tensors[1]}: accepted: positive, finite scales")
        return Int8Stored(weight, scales)
