"""A weight and the GEMM that was chosen for how it is stored."""

from __future__ import annotations

from torch import Tensor

from trueline.layers.context import Build
from trueline.weights.value import Weight


class WeightGemm:
    def __init__(self, build: Build, weight: Weight) -> None:
        self.op = build.packing(weight).linear
        self.packed = self.op.pack(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self.op.run(x, self.packed)
