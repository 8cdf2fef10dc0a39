"""torch's own functions, on any device. All are exact or round each number by itself, sums of the
Hadamard matrix are made in a fixed order: no bit depends on how many rows there are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueline.cache.fp8 import in_groups, join, power_of_two_above, through_e4m3
from trueline.ops.row_rounding import IMPLEMENTATIONS, INDEX_GROUP, KEY_GROUP

capabilities = IMPLEMENTATIONS["composed"]

LARGEST, FLOOR = 6.0, 6 * 2.0**-126
"""Of e2m1: its largest number, and the least that a group's is taken for."""
FINEST = -1
"""e2m1's numbers are 2^-1 apart below 2, from there on a quarter of the next power of two."""


def key(rows: Tensor, *, rope: int) -> Tensor:
    short = rows.bfloat16()
    plain = rows.shape[-1] - rope
    coded = through_e4m3(short[:, :plain].float(), KEY_GROUP, power_of_two=True)
    return torch.cat((coded.to(rows.dtype), short[:, plain:].to(rows.dtype)), dim=-1)


def index(rows: Tensor) -> Tensor:
    turned = _hadamard(rows.bfloat16().float()).bfloat16().float()
    groups = _through_e2m1(in_groups(turned, INDEX_GROUP))
    return join(groups, rows.shape[-1]).to(rows.dtype)


def _hadamard(x: Tensor) -> Tensor:
    """Sums and differences of neighbours, then of pairs of them, and so on."""
    size, half = x.shape[-1], 1
    while half < size:
        a, b = x.reshape(*x.shape[:-1], size // (2 * half), 2, half).unbind(-2)
        x, half = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * half
    return x * math.sqrt(1 / size)


def _through_e2m1(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True)
    scales = power_of_two_above(amax.clamp_min(FLOOR) / LARGEST)
    scales = scales.masked_fill(~amax.isfinite(), torch.nan)
    x = groups / scales
    _, exponents = torch.frexp(x)  # 2^exponent is above |x|
    steps = torch.ldexp(torch.ones_like(x), (exponents - 2).clamp_min(FINEST))
    # torch rounds ties to even multiples of a step: those are the even codes
    return (x / steps).round() * steps * scales
