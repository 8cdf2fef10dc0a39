"""Token by token, in float64; rounded where the contract says so."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.ops.index_write import IMPLEMENTATIONS
from trueline.ops.rope import Rope
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["reference"]


def run(
    key: Tensor,
    view: IndexView,
    cells: Tensor,
    *,
    norm: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    rope: Rope,
) -> None:
    for token in range(len(cells)):
        x = key[token].double()
        off = x - x.mean()
        normed = off / (off.square().mean() + eps).sqrt() * norm.double() + bias.double()
        row = _rotated(normed.to(key.dtype).double(), cos[token], sin[token], pairing)
        view.write(cells[token : token + 1], row.to(key.dtype)[None])


def rotate(q: Tensor, *, cos: Tensor, sin: Tensor, pairing: Pairing, rope: Rope) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for token, heads in enumerate(q):
        for head, x in enumerate(heads):
            out[token, head] = _rotated(x.double(), cos[token], sin[token], pairing)
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Channels 2i and 2i + 1, or i and i + half, of those that are rotated."""
    out, half = x.clone(), len(cos)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + half)
        out[a] = x[a] * cos[i].double() - x[b] * sin[i].double()
        out[b] = x[b] * cos[i].double() + x[a] * sin[i].double()
    return out
