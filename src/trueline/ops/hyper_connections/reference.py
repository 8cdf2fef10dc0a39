"""Token by token, stream by stream, in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.ops.hyper_connections import IMPLEMENTATIONS, Mixed
from trueline.ops.rms_norm import RMSNorm

capabilities = IMPLEMENTATIONS["reference"]


def mix(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Mixed:
    n, streams, _ = h.shape
    sizes = [streams, streams, streams * streams]
    parts = torch.split(_projected(h, fn, norm_eps), sizes, dim=-1)
    pre, post, carry = (
        part * scale[i].double() + added.double()
        for i, (part, added) in enumerate(zip(parts, torch.split(base, sizes), strict=True))
    )
    carry = _sinkhorn(carry.view(n, streams, streams), eps, iterations)
    kept = torch.promote_types(h.dtype, torch.float32)
    return Mixed(_read(h, pre, eps), (2 * _sigmoid(post)).to(kept), carry.to(kept))


def merge(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
    out = torch.zeros(h.shape, dtype=torch.float64)
    post, carry = mixed.post.double(), mixed.carry.double()
    for to in range(h.shape[1]):
        out[:, to] = post[:, to, None] * y.double()
        for source in range(h.shape[1]):
            out[:, to] += carry[:, source, to, None] * h[:, source].double()
    return out.to(h.dtype)


def advance(
    h: Tensor,
    y: Tensor,
    mixed: Mixed,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm: RMSNorm,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Mixed]:
    h = merge(h, y, mixed)
    made = mix(h, fn, base, scale, norm_eps=norm_eps, eps=eps, iterations=iterations)
    return h, replace(made, x=norm.run(made.x, weight, norm_eps))


def head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    return _read(h, _projected(h, fn, norm_eps) * scale.double() + base.double(), eps)


def _projected(h: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = h.flatten(1).double()
    return flat / (flat.square().mean(-1, keepdim=True) + norm_eps).sqrt() @ fn.double().T


def _read(h: Tensor, pre: Tensor, eps: float) -> Tensor:
    return ((_sigmoid(pre) + eps)[..., None] * h.double()).sum(1).to(h.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _sinkhorn(carry: Tensor, eps: float, iterations: int) -> Tensor:
    carry = carry.softmax(-1) + eps
    carry = carry / (carry.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        carry = carry / (carry.sum(-1, keepdim=True) + eps)
        carry = carry / (carry.sum(-2, keepdim=True) + eps)
    return carry
