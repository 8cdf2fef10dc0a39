from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.rms_norm import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["reference"]


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(torch.float64)
    y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)
    return (y.to(x.dtype).double() * weight.double()).to(x.dtype)


def run_sum(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (h.double() + y.double()).to(h.dtype)
    return total, run(total, weight, eps)
