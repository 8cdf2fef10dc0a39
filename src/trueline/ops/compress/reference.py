"""One window, one channel at a time, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.cache.blocks import NULL_BLOCK
from trueline.cache.tails import TailLayout, TailView
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
    made: list[Tensor] = []
    for run, rows in zip(prepared.runs, at_hand(prepared, u, z, ape, tails), strict=True):
        for window in run.windows(len(ape)):
            pooled = _pooled(rows, window, tails.layout, len(norm))
            at = len(made)
            made.append(_finished(pooled, norm, eps, cos[at], sin[at], pairing))
    tails.rows[cells] = _with_bias(prepared, u, z, ape)
    return torch.stack(made).to(norm.dtype) if made else norm.new_empty(0, len(norm))


def _with_bias(rows: CompressRows, u: Tensor, z: Tensor, ape: Tensor) -> Tensor:
    """[n, 2, width] of the step's tokens."""
    phases = [p % len(ape) for run in rows.runs for p in range(run.start, run.stop)]
    return torch.stack((u.float(), z.float() + ape[phases].float()), dim=1)


def at_hand(
    rows: CompressRows, u: Tensor, z: Tensor, ape: Tensor, tails: TailView
) -> Iterator[dict[int, Tensor]]:
    """Of each run [2, width] by position: the step's own, and those before that its tails have."""
    own, size = _with_bias(rows, u, z, ape), tails.layout.block_size
    for run in rows.runs:
        mine, own = own[: run.count], own[run.count :]
        kept = [p for p in range(run.start) if run.tails[p // size] != NULL_BLOCK]
        held = {p: tails.rows[run.tails[p // size] * size + p % size] for p in kept}
        yield held | dict(zip(range(run.start, run.stop), mine, strict=True))


def _pooled(rows: dict[int, Tensor], window: int, layout: TailLayout, dim: int) -> Tensor:
    """[dim] of the slots of a window."""
    ratio = layout.ratio
    slots = [(p, slice(-dim, None)) for p in range(window * ratio, (window + 1) * ratio)]
    if layout.overlap and window:
        before = range((window - 1) * ratio, window * ratio)
        slots = [(p, slice(dim)) for p in before] + slots
    held = [rows[p][:, half] for p, half in slots]
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
