"""Norm, rotation and the cache's own write, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.ops.index_write import IMPLEMENTATIONS
from trueline.ops.rope import Rope
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["composed"]


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
    normed = torch.nn.functional.layer_norm(
        key.float(), key.shape[-1:], norm.float(), bias.float(), eps
    )
    rotated = rotate_first(normed.to(key.dtype)[:, None], cos, sin, pairing, rope)
    view.write(cells, rotated[:, 0])


def rotate(q: Tensor, *, cos: Tensor, sin: Tensor, pairing: Pairing, rope: Rope) -> Tensor:
    return rotate_first(q, cos, sin, pairing, rope)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, rope: Rope) -> Tensor:
    """The other channels stay."""
    dim = 2 * cos.shape[1]
    return torch.cat((rope.run(x[..., :dim], cos, sin, pairing), x[..., dim:]), dim=-1)
