"""Batch-invariant: products run over as many rows at a time whatever the batch, and sums over
streams are written out, so that their order is ours."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.ops import invariant_math
from trueline.ops.hyper_connections import IMPLEMENTATIONS, Mixed
from trueline.ops.rms_norm import RMSNorm

capabilities = IMPLEMENTATIONS["cpu"]

# Rows of a product: whole vectors of every CPU, and few where there is one token.
TILE = 16


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
    factors = torch.cat([scale[i].expand(size) for i, size in enumerate(sizes)])
    pre, post, carry = torch.split(_projected(h, fn, norm_eps) * factors + base, sizes, dim=-1)
    carry = _sinkhorn(carry.reshape(n, streams, streams), eps, iterations)
    return Mixed(_read(h, pre, eps), 2 * invariant_math.sigmoid(post), carry)


def merge(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
    out = mixed.post[..., None] * y.float()[:, None]
    for source in range(h.shape[1]):
        out = out + mixed.carry[:, source, :, None] * h[:, source, None].float()
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
    return _read(h, _projected(h, fn, norm_eps) * scale + base, eps)


def _projected(h: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn · flat(h) / rms(flat(h)), [n, rows of fn]."""
    flat = h.flatten(1).float()
    flat = pad(flat, (0, 0, 0, -len(h) % TILE))
    tiles = [_tile(tile, fn, norm_eps) for tile in torch.split(flat, TILE)]
    made = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return made[: len(h)]


def _tile(rows: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    # the rows' squares are summed as the product is: always over as many rows
    squares = rows.square().mean(-1, keepdim=True)
    return torch.mm(fn, rows.t()).t() * torch.rsqrt(squares + norm_eps)


def _read(h: Tensor, pre: Tensor, eps: float) -> Tensor:
    weights = invariant_math.sigmoid(pre) + eps
    return _total(weights[..., None] * h.float(), 1).squeeze(1).to(h.dtype)


def _sinkhorn(carry: Tensor, eps: float, iterations: int) -> Tensor:
    carry = invariant_math.exp(carry - carry.amax(-1, keepdim=True))
    carry = carry / _total(carry, -1) + eps
    carry = carry / (_total(carry, -2) + eps)
    for _ in range(iterations - 1):
        carry = carry / (_total(carry, -1) + eps)
        carry = carry / (_total(carry, -2) + eps)
    return carry


def _total(x: Tensor, dim: int) -> Tensor:
    return reduce(torch.add, torch.split(x, 1, dim))
