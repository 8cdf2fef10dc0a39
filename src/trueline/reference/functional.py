"""Functions that several kinds of layers share: linear, norm, rotation, top-k."""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Params = dict[str, Tensor]


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(params: Params, name: str, x: Tensor) -> Tensor:
    return x @ params[f"{name}.weight"].T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight  # rounded before the weight, as in Llama


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest; of equal values the lowest index wins."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
