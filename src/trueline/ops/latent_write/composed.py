"""The chosen norm and rotation, one after the other."""

from __future__ import annotations

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_write import IMPLEMENTATIONS, Parts
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["composed"]


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
    rotated = parts.rope.run(key[:, None], cos, sin, pairing)[:, 0]
    view.write(cells, parts.rms_norm.run(latent, norm, eps), rotated)
    wide = queries.new_empty(*queries.shape[:2], view.layout.width)
    wide[..., view.layout.latent :] = parts.rope.run(queries, cos, sin, pairing)
    return wide
