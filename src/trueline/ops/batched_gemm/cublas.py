"""torch.bmm: on a GPU, cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.batched_gemm import IMPLEMENTATIONS
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["cublas"]


def pack(weight: Weight | Tensor, linear: LinearOp, batch_invariant: bool) -> Tensor:
    return dense(weight).contiguous()


def run(x: Tensor, packed: Tensor, to: Tensor | None = None) -> Tensor:
    y = x.new_empty(len(x), *packed.shape[:2]) if to is None else to
    if y.stride(2) != 1:
        return y.copy_(run(x, packed))
    torch.bmm(x.transpose(0, 1), packed.mT, out=y.transpose(0, 1))
    return y
