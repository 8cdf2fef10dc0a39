"""Numbers of a cache in fp8: codes, and scales that all numbers of a vector share."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.layout import AMAX_FLOOR, Fp8

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


def fp8_scales(x: Tensor, fp8: Fp8, power_of_two: bool) -> Tensor:
    """Of vectors [..., dim] in float32 -> float32 [...]; NaN for one that has an infinity or a
    NaN, so that it stays visible."""
    amax = x.abs().amax(-1)
    wanted = amax.clamp_min(AMAX_FLOOR) / fp8.largest
    if power_of_two:
        mantissa, exponent = torch.frexp(wanted)
        wanted = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())
    return wanted.masked_fill(~amax.isfinite(), torch.nan)


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * scales[..., None]
