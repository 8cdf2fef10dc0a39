"""Row by row, in float64, rounded where the contract says."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.rms_norm import RMSNorm
from trueline.ops.sink_prepare import IMPLEMENTATIONS, Rotation

capabilities = IMPLEMENTATIONS["reference"]


def write(
    projected: Tensor,
    view: LatentView,
    cells: Tensor,
    *,
    norms: tuple[Tensor, Tensor],
    eps: float,
    rope: Rotation,
    rms_norm: RMSNorm,
) -> Tensor:
    rank, dtype = len(norms[0]), projected.dtype
    latent = torch.empty(len(projected), rank, dtype=dtype)
    for i, (row, cell) in enumerate(zip(projected, cells.tolist(), strict=True)):
        latent[i] = _normed(row[:rank], norms[0], eps)
        made = _rotated(_normed(row[rank:], norms[1], eps), rope, i, 1.0)
        kept = view.layout.latent
        view.write(torch.tensor([cell]), made[None, :kept], made[None, kept:])
    return latent


def queries(q: Tensor, *, eps: float, rope: Rotation, rms_norm: RMSNorm) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    for token in range(q.shape[0]):
        for head in range(q.shape[1]):
            normed = _normed(q[token, head], torch.ones(q.shape[2]), eps)
            out[token, head] = _rotated(normed, rope, token, 1.0)
    return out


def rotate(x: Tensor, *, rope: Rotation, back: bool = False) -> Tensor:
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            x[token, head] = _rotated(x[token, head], rope, token, -1.0 if back else 1.0)
    return x


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    numbers = x.double()
    unit = (numbers / torch.sqrt(numbers.square().mean() + eps)).to(x.dtype)
    return (unit.double() * weight.double()).to(x.dtype)


def _rotated(x: Tensor, rope: Rotation, token: int, sign: float) -> Tensor:
    half = rope.cos.shape[-1]
    first, out = len(x) - 2 * half, x.clone()
    for i in range(half):
        pair = (2 * i, 2 * i + 1) if rope.pairing == "interleaved" else (i, i + half)
        at, to = (first + place for place in pair)
        c, s = rope.cos[token, i].double(), sign * rope.sin[token, i].double()
        a, b = x[at].double(), x[to].double()
        out[at], out[to] = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)
    return out
