from __future__ import annotations

import torch
from torch import Tensor

from trueline.native import library
from trueline.ops.rms_norm import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["native"]


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    flat = x.reshape(-1, x.shape[-1])
    y = torch.empty(x.shape)
    library().rms_norm(
        *(flat.data_ptr(), flat.stride(0), weight.data_ptr(), eps, y.data_ptr(), *flat.shape)
    )
    return y


def run_sum(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = h + y
    return total, run(total, weight, eps)
