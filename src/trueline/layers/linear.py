"""Weights and the GEMMs that were chosen for how they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.layers.context import Build
from trueline.weights.value import Weight


class WeightGemm:
    """x times several weights, their outputs one after the other: in one GEMM, or in one each where
    some of them have activations quantised and others not."""

    def __init__(self, build: Build, *weights: Weight) -> None:
        whole = Weight.concat(weights)
        self.gemms = [
            (op := build.packing(weight).linear, op.pack(weight))
            for weight in (weights if build.mixes_numerics(whole) else (whole,))
        ]

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [op.run(x, packed) for op, packed in self.gemms]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
