from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.rms_norm import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["cpu"]


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight


def run_sum(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = h + y
    return total, run(total, weight, eps)
