"""Numerics `activations`: what fp8 makes of x, times what the weight means, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.fp8 import through_e4m3
from trueline.ops.linear import IMPLEMENTATIONS, torch_mm
from trueline.weights.formats.block_fp8 import INPUT_GROUP, Fp8Stored
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["fp8_inputs"]


@dataclass(frozen=True, slots=True)
class Packed:
    weight: torch_mm.Packed
    powers_of_two: bool
    """Whether scales of x are."""


def pack(weight: Weight | Tensor) -> Packed:
    if isinstance(weight, Tensor):
        return Packed(torch_mm.pack(weight.float()), powers_of_two=False)
    (powers_of_two,) = {
        isinstance(part.stored, Fp8Stored) and part.stored.powers_of_two for part in weight.parts
    }
    return Packed(torch_mm.pack(weight.dequantise(torch.float32)), powers_of_two)


def run(x: Tensor, packed: Packed) -> Tensor:
    return run_wide(x, packed).to(x.dtype)


def run_wide(x: Tensor, packed: Packed) -> Tensor:
    return torch_mm.run(through_fp8(x.float(), packed.powers_of_two), packed.weight)


def through_fp8(x: Tensor, powers_of_two: bool) -> Tensor:
    return through_e4m3(x, INPUT_GROUP, powers_of_two)
