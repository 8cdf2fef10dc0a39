"""The layer: two GEMMs, and a gather from the pool for each tap."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.layers.context import ANYWHERE, Build, Rope, StepInput, Weights
from trueline.layers.linear import WeightGemm
from trueline_conv.kind import ConvTail
from trueline_conv.spec import ConvSpec


class ShortConv:
    api_version = 5
    # Taps are added one by one: a row's bits are its own.
    capabilities = ANYWHERE

    def __init__(self, spec: ConvSpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.row_parallel = spec, build.row_parallel
        self.first = WeightGemm(build, weights.stored(f"{name}.in_proj.weight"))
        self.taps = weights.take(f"{name}.conv.weight").T.contiguous()
        self.o = WeightGemm(build, weights.stored(f"{name}.o_proj.weight"))

    def forward(self, x: Tensor, step: StepInput, views: LayerViews, rope: Rope) -> Tensor:
        given, tails = step[ConvTail], views[ConvTail]
        before, after, inner = self.first(x).chunk(3, -1)
        inputs = before * inner
        pool = torch.cat((tails.flatten(0, 1), inputs, torch.zeros_like(inputs[:1])))
        out = torch.zeros_like(inputs)
        for weight, rows in zip(self.taps, given.taps.T, strict=True):
            out = out + weight * pool[rows]
        tails[given.slots] = pool[given.taps[given.written_at, 1:]]
        return self.row_parallel.run(after * out, self.o, self.spec.channels)
