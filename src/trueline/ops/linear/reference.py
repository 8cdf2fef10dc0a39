"""float64, the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.linear import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["reference"]


def pack(weight: Weight | Tensor) -> Tensor:
    return dense(weight).to(torch.float64)


def run(x: Tensor, packed: Tensor) -> Tensor:
    return (x.to(torch.float64) @ packed.T).to(x.dtype)


def run_wide(x: Tensor, packed: Tensor) -> Tensor:
    return (x.to(torch.float64) @ packed.T).float()
