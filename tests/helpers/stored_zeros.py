"""Weights for tests of kernels that nobody launches: quantised ones as stored, all zeros."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from trueline.spec.model import ModelSpec
from trueline.spec.parameters import Parameter
from trueline.weights import dummy
from trueline.weights.dummy import DummyWeights
from trueline.weights.formats import Format, Stored
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.formats.fp4 import GROUP, Fp4Stored
from trueline.weights.formats.pack_int4 import WORD, Int4Stored, PackInt4
from trueline.weights.value import Weight


class StoredZeros(DummyWeights, ABC):
    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        super().__init__(spec, dtype=dtype, device=device, seed=seed)
        replaced: Any = dummy  # a device without data has no generator either
        replaced._generator = lambda *_: device
        replaced.draw_stored = zeros_stored

    @abstractmethod
    def plain(self, parameter: Parameter) -> Weight:
        """One that is not quantised."""

    def pop(self, name: str) -> Weight:
        parameter = self._parameters[name]
        if any(self._format(parameter, piece) for piece in parameter.pieces):
            return super().pop(name)
        return self.plain(self._parameters.pop(name))


def zeros_stored(fmt: Format, shape: Any, plain: torch.dtype, device: torch.device) -> Stored:
    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows, columns = shape
    if isinstance(fmt, BlockFp8):
        grid = (-(-size // block) for size, block in zip(shape, fmt.block, strict=True))
        codes, scales = zeros(*shape, dtype=torch.float8_e4m3fn), zeros(*grid, dtype=torch.float32)
        return Fp8Stored(codes, scales, fmt.block, powers_of_two=fmt.powers_of_two)
    if isinstance(fmt, PackInt4):
        scales = zeros(rows, -(-columns // fmt.group), dtype=plain)
        packed = zeros(rows, -(-columns // WORD), dtype=torch.int32)
        return Int4Stored(packed, scales, fmt.group, columns)
    scales = zeros(rows, -(-columns // GROUP), dtype=torch.uint8)
    return Fp4Stored(zeros(rows, -(-columns // 2), dtype=torch.uint8), scales, columns)
