"""Functions that several kinds of layers share: linear, norm, rotation, top-k."""

from collections.abc import Iterable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Params = dict[str, Tensor]
LARGEST = 448.0  # of float8_e4m3fn
GROUP, FLOOR = 128, 1e-4


class Fp8Inputs(Params):
    """Numerics `activations`: the inputs of these modules go through fp8."""

    def __init__(self, params: Params, modules: Iterable[str], powers_of_two: bool) -> None:
        super().__init__(params)
        self.modules, self.powers_of_two = frozenset(modules), powers_of_two


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    if isinstance(params, Fp8Inputs) and name in params.modules:
        x = through_fp8(x, params.powers_of_two)
    return x @ params[f"{name}.weight"].T


def through_fp8(x: Tensor, powers_of_two: bool, size: int | None = None) -> Tensor:
    """Each token's groups of 128 channels, or of `size`, the last one what is left of them:
    code * scale, with scale = amax / 448, amax at least 1e-4, or the next power of two."""
    groups = []
    for group in torch.split(x, size or GROUP, dim=-1):
        scale = wide(group).abs().amax(-1, keepdim=True).clamp_min(FLOOR) / LARGEST
        if powers_of_two:
            scale = power_of_two_above(scale)
        codes = (wide(group) / scale).to(torch.float8_e4m3fn)
        groups.append((codes.to(scale.dtype) * scale).to(x.dtype))
    return torch.cat(groups, dim=-1)


def power_of_two_above(scale: Tensor) -> Tensor:
    """The least that is not smaller."""
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight  # rounded before the weight, as in Llama


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Over the last axis, without a weight; in float32 at least."""
    y = wide(x)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)


def rms_norm_rounded_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Behind the weight, as in DeepSeek V4."""
    return (unit_rms(x, eps) * wide(weight)).to(x.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotate_last(x: Tensor, rope: Pair) -> Tensor:
    """[T, ..., d]: as many of the last channels as the table is wide for, interleaved, the rest as
    they are; in float32 at least."""
    y = wide(x)
    width = rope[0].shape[-1]
    cos, sin = (table.to(y.dtype).view(len(x), *[1] * (x.dim() - 2), width) for table in rope)
    plain = x.shape[-1] - 2 * width
    return torch.cat((y[..., :plain], rotate_interleaved(y[..., plain:], cos, sin)), -1).to(x.dtype)


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest; of equal values the lowest index wins."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
