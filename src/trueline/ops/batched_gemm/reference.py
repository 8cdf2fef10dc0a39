"""Head by head, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.batched_gemm import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["reference"]


def pack(weight: Weight | Tensor, linear: object, batch_invariant: bool) -> Tensor:
    return dense(weight).double()


def run(x: Tensor, packed: Tensor, to: Tensor | None = None) -> Tensor:
    heads = [x[:, h].double() @ packed[h].T for h in range(len(packed))]
    y = torch.stack(heads, dim=1).to(x.dtype)
    return y if to is None else to.copy_(y)
