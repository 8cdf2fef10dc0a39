"""torch's own product on a GPU: cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(weight: Tensor) -> Tensor:
    return weight.contiguous()


def run(x: Tensor, packed: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, packed)
