"""Numbers of a cache in fp8: codes, and scales that all numbers of a vector share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.cache.layout import AMAX_FLOOR, STORAGES, Fp8

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
        wanted = power_of_two_above(wanted)
    return wanted.masked_fill(~amax.isfinite(), torch.nan)


def power_of_two_above(scales: Tensor) -> Tensor:
    """The least that is not smaller."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * scales[..., None]


def in_groups(x: Tensor, group: int) -> Tensor:
    """[..., channels] -> [..., groups, group]; zeros after the last channel."""
    count = -(-x.shape[-1] // group)
    padded = pad(x, (0, count * group - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], count, group)


def join(groups: Tensor, channels: int) -> Tensor:
    return groups.flatten(-2)[..., :channels]


def through_e4m3(x: Tensor, group: int, power_of_two: bool) -> Tensor:
    """x [..., channels] in float32, as codes and scales of each vector's groups mean it; what is
    left of the channels is a group too."""
    e4m3 = STORAGES["e4m3fn"].fp8
    assert e4m3 is not None
    groups = in_groups(x, group)
    scales = fp8_scales(groups, e4m3, power_of_two)
    codes = (groups / scales[..., None]).to(DTYPES["e4m3fn"])
    return join(dequantise(codes.float(), scales), x.shape[-1])
