"""Head by head, in float64, rounded where the contract says."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.latent_write import Parts
from trueline.ops.qkv_prepare import IMPLEMENTATIONS
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["reference"]


def run(
    qkv: Tensor,
    *,
    heads: int,
    silu: bool,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rope: tuple[Tensor, Tensor, Pairing] | None,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:
    numbers = qkv.double()
    if silu:
        numbers = (numbers / (1 + torch.exp(-numbers))).to(qkv.dtype).double()
    d = qkv.shape[1] // (3 * heads)
    out = torch.empty(3, len(qkv), heads, d, dtype=torch.float64)
    for part in range(3):
        for head in range(heads):
            first = (part * heads + head) * d
            x = numbers[:, first : first + d]
            if norms is not None and part < 2:
                x = _normed(x, norms[part], eps, qkv.dtype)
            if rope is not None and part < 2:
                x = _rotated(x, *rope)
            out[part, :, head] = x
    q, k, v = out.to(qkv.dtype)
    return q, k, v


def _normed(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return (x.to(dtype).double() * weight.double()).to(dtype).double()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    x, half = x.clone(), cos.shape[-1]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + half)
        a, b, c, s = x[:, first], x[:, second], cos[:, i].double(), sin[:, i].double()
        x[:, first], x[:, second] = a * c - b * s, b * c + a * s
    return x
