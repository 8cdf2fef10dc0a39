"""torch's own GEMM: on a GPU, cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from trueline.ops.linear import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["cublas"]


def pack(weight: Weight | Tensor) -> Tensor:
    return dense(weight).contiguous()


def run(x: Tensor, packed: Tensor) -> Tensor:
    return linear(x, packed)


def run_wide(x: Tensor, packed: Tensor) -> Tensor:
    if x.dtype == torch.float32 or x.device.type != "cuda":  # only CUDA's has `out_dtype`
        return linear(x.float(), packed.float())
    return torch.mm(x, packed.T, out_dtype=torch.float32)
