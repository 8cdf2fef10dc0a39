"""The chosen norm, then the gate."""

from __future__ import annotations

from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.gated_norm import IMPLEMENTATIONS
from trueline.ops.latent_write import Parts

capabilities = IMPLEMENTATIONS["composed"]


def run(
    x: Tensor, gate: Tensor, *, weight: Tensor, groups: int, eps: float, parts: Parts
) -> Tensor:
    rows = x.reshape(len(x) * groups, -1)
    normed: Tensor = parts.rms_norm.run(rows, weight.new_ones(rows.shape[1]), eps)
    return normed.view(x.shape) * weight * invariant_math.sigmoid(gate.float()).to(x.dtype)
