"""Block fp8 on Hopper GPUs, x quantised too (numerics `activations`): few rows and many have
kernels of their own. Weights whose blocks these do not take are dequantised in the portable
kernel's registers, and x goes through fp8 before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.ops.codes import Codes, codes_of
from trueline.ops.fp8_launch import arrivals, few, fits, gemm, quantised, takes_few, through_fp8
from trueline.ops.linear import IMPLEMENTATIONS, triton_quantised
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["hopper_fp8"]


@dataclass(frozen=True, slots=True)
class Packed:
    codes: Codes
    arrived: Tensor | None
    """None: the portable kernel's."""


def pack(weight: Weight | Tensor) -> Packed:
    assert isinstance(weight, Weight), "the plan chose it for a quantised format"
    return of_codes(codes_of(weight))


def of_codes(codes: Codes) -> Packed:
    return Packed(codes, arrivals(codes) if fits(codes) else None)


def run(x: Tensor, packed: Packed) -> Tensor:
    return _run(x, packed, x.dtype)


def run_wide(x: Tensor, packed: Packed) -> Tensor:
    return _run(x, packed, torch.float32)


def _run(x: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    codes = packed.codes
    if packed.arrived is None:
        x = through_fp8(x, powers=codes.powers_of_two)
        how = triton_quantised.launch(len(x))
        return triton_quantised.run_with(how, x, codes, dtype)
    if takes_few(len(x), codes) or dtype == torch.float32:
        return few(x, codes, packed.arrived, dtype)
    rows = quantised(x, powers=codes.powers_of_two)
    return gemm(rows, codes, gated=False, powers=False, dtype=dtype)[0][: len(x)]
