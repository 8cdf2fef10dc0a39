"""Channel by channel, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.rope import IMPLEMENTATIONS
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["reference"]


def run(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    half = x.shape[-1] // 2
    out = torch.empty_like(x, dtype=torch.float64)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + half)
        a, b = x[..., first].double(), x[..., second].double()
        c, s = cos[:, i, None].double(), sin[:, i, None].double()
        out[..., first] = a * c - b * s
        out[..., second] = b * c + a * s
    return out.to(x.dtype)
