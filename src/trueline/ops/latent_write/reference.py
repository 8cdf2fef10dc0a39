"""Token by token, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_write import IMPLEMENTATIONS, Parts
from trueline.ops.latent_write.stored import store_row
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["reference"]


def run(
    latent: Tensor,
    key: Tensor,
    queries: Tensor,
    view: LatentView,
    cells: Tensor,
    *,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    parts: Parts,
) -> Tensor:
    wide = queries.new_zeros(*queries.shape[:2], latent.shape[1] + key.shape[1])
    for token, cell in enumerate(cells.tolist()):
        numbers = latent[token].double()
        normed = (numbers / (numbers.square().mean() + eps).sqrt()).to(latent.dtype).double()
        by = (cos[token].double(), sin[token].double(), pairing)
        store_row(view, cell, normed * norm.double(), _rotated(key[token].double(), *by))
        for head in range(queries.shape[1]):
            wide[token, head, latent.shape[1] :] = _rotated(queries[token, head].double(), *by)
    return wide


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """As complex numbers: channels 2i and 2i + 1, or i and i + half."""
    half = len(x) // 2
    a, b = (x[0::2], x[1::2]) if pairing == "interleaved" else (x[:half], x[half:])
    product = torch.complex(a, b) * torch.complex(cos, sin)
    parts = (product.real, product.imag)
    return torch.stack(parts, 1).flatten() if pairing == "interleaved" else torch.cat(parts)
