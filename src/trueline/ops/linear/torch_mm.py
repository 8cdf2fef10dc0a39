"""Plain torch, with the weight as the left operand: faster than x Wᵀ at every row count seen."""

from __future__ import annotations

import torch
from torch import Tensor

# From here on the bits of a row no longer depend on the number of rows.
STEADY_ROWS = 16


def pack(weight: Tensor) -> Tensor:
    return weight.contiguous()


def run(x: Tensor, packed: Tensor) -> Tensor:
    count = x.shape[0]
    padded = -(-count // STEADY_ROWS) * STEADY_ROWS
    if padded != count:
        x = torch.nn.functional.pad(x, (0, 0, 0, padded - count))
    return torch.mm(packed, x.t()).t()[:count]
