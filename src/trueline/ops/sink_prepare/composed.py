"""The chosen norm and rotation, and the view's own write, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.rms_norm import RMSNorm
from trueline.ops.sink_prepare import IMPLEMENTATIONS, Rotation

capabilities = IMPLEMENTATIONS["composed"]


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
    widths = [len(norm) for norm in norms]
    latent, row = torch.split(projected, widths, dim=-1)
    normed = rms_norm.run(row, norms[1], eps)
    rotated = rotate(normed[:, None], rope=rope)[:, 0]
    kept = view.layout.latent
    view.write(cells, rotated[:, :kept], rotated[:, kept:])
    return rms_norm.run(latent, norms[0], eps)


def queries(q: Tensor, *, eps: float, rope: Rotation, rms_norm: RMSNorm) -> Tensor:
    width = q.shape[-1]
    normed = rms_norm.run(q.reshape(-1, width), q.new_ones(width), eps)
    return rotate(normed.view(q.shape), rope=rope)


def rotate(x: Tensor, *, rope: Rotation, back: bool = False) -> Tensor:
    turned = x[..., x.shape[-1] - 2 * rope.cos.shape[-1] :]
    sin = -rope.sin if back else rope.sin
    turned.copy_(rope.rope.run(turned, rope.cos, sin, rope.pairing))
    return x
