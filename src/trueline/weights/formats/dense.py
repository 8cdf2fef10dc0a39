"""Plain float: the numbers as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import PLAIN_DTYPES, Format, wrong_shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseStored:
    numbers: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def cut(self, axis: int, start: int, stop: int) -> DenseStored:
        return DenseStored(self.numbers.narrow(axis, start, stop - start))

    def dequantise(self) -> Tensor:
        return self.numbers


@dataclass(frozen=True, kw_only=True)
class DenseFormat(Format):
    """What a checkpoint without `quantization_config` has, and every other one has beside its
    quantised weights."""

    label = "dense"

    def names(self, weight: str) -> tuple[str, ...]:
        return (weight,)

    def stored_slices(self, cut: tuple[slice, ...]) -> tuple[tuple[slice, ...], ...]:
        return (cut,)

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        (tensor,) = tensors
        if wrong := wrong_shape(tensor, shape):
            return wrong
        if tensor.dtype in PLAIN_DTYPES:
            return None
        return f"{tensor}: accepted here: {', '.join(PLAIN_DTYPES)}"

    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> DenseStored:
        return DenseStored(values[0])


@dataclass(frozen=True, kw_only=True)
class IntegerFormat(DenseFormat):
    """A table of integers: never quantised, never rounded."""

    label = "integers"

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        (tensor,) = tensors
        if wrong := wrong_shape(tensor, shape):
            return wrong
        return None if tensor.dtype == "I64" else f"{tensor}: accepted here: I64"


INTEGERS = IntegerFormat()
DENSE = DenseFormat()
