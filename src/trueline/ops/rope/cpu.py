from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.rope import IMPLEMENTATIONS
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["cpu"]


def run(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    if pairing == "interleaved":
        pairs = x.unflatten(-1, (-1, 2)).float()  # type: ignore[no-untyped-call]
        a, b = pairs[..., 0], pairs[..., 1]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = x.float().chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return rotated.to(x.dtype)
