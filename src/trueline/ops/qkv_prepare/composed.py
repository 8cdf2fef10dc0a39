"""The chosen norm and rotation, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.latent_write import Parts
from trueline.ops.qkv_prepare import IMPLEMENTATIONS
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["composed"]


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
    if silu:
        qkv = invariant_math.silu(qkv)
    q, k, v = qkv.reshape(len(qkv), 3, heads, -1).unbind(1)
    if norms is not None:
        q, k = (parts.rms_norm.run(x, norm, eps) for x, norm in zip((q, k), norms, strict=True))
    if rope is not None:
        q, k = _rotated(q, *rope, parts), _rotated(k, *rope, parts)
    return q, k, v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, parts: Parts) -> Tensor:
    """The first channels of every head are rotated, the others stay."""
    dim = 2 * cos.shape[-1]
    rotated = parts.rope.run(x[..., :dim], cos, sin, pairing)
    return torch.cat((rotated, x[..., dim:]), dim=-1)
