"""One window, one channel at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.tails import TailView
from trueline.ops.compress import IMPLEMENTATIONS, CompressRows, CompressTable
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["reference"]


def prepare(rows: CompressRows | CompressTable, tails: TailView) -> CompressRows:
    assert not isinstance(rows, CompressTable), "tables are for GPUs"
    return rows


def run(
    u: Tensor,
    z: Tensor,
    tails: TailView,
    cells: Tensor,
    prepared: CompressRows,
    *,
    ape: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
) -> Tensor:
    ratio = len(ape)
    positions = [p for run in prepared.runs for p in range(run.start, run.stop)]
    for token, (position, cell) in enumerate(zip(positions, cells.tolist(), strict=True)):
        tails.rows[cell, 0] = u[token].float()
        tails.rows[cell, 1] = z[token].float() + ape[position % ratio].float()
    made: list[Tensor] = []
    for run in prepared.runs:
        for position in range(run.start, run.stop):
            if position % ratio == ratio - 1:
                pooled = _pooled(tails, run.tails, position // ratio, len(norm))
                at = len(made)
                made.append(_finished(pooled, norm, eps, cos[at], sin[at], pairing))
    return torch.stack(made).to(norm.dtype) if made else norm.new_empty(0, len(norm))


def _pooled(tails: TailView, block_ids: list[int], window: int, dim: int) -> Tensor:
    """[dim] of the slots of a window."""
    size, ratio = tails.layout.block_size, tails.layout.ratio
    slots = [(p, slice(-dim, None)) for p in range(window * ratio, (window + 1) * ratio)]
    if tails.layout.overlap and window:
        before = range((window - 1) * ratio, window * ratio)
        slots = [(p, slice(dim)) for p in before] + slots
    held = [tails.rows[block_ids[p // size] * size + p % size, :, half] for p, half in slots]
    values, scores = torch.stack(held).double().unbind(1)
    out = torch.empty(dim, dtype=torch.float64)
    for channel in range(dim):
        out[channel] = scores[:, channel].softmax(0) @ values[:, channel]
    return out


def _finished(
    x: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, pairing: Pairing
) -> Tensor:
    y = x / (x.square().mean() + eps).sqrt() * norm.double()
    half = len(cos)
    first = len(y) - 2 * half
    out = y.clone()
    for i, (c, s) in enumerate(zip(cos.double(), sin.double(), strict=True)):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + half)
        out[first + a] = y[first + a] * c - y[first + b] * s
        out[first + b] = y[first + b] * c + y[first + a] * s
    return out
