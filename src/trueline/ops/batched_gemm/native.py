from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.device import large_empty
from trueline.native import packable, panel, weighted
from trueline.ops.batched_gemm import IMPLEMENTATIONS
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["native"]


@dataclass(frozen=True, slots=True)
class Packed:
    data: Tensor
    columns: int
    inner: int


def pack(weight: Weight | Tensor, linear: LinearOp, batch_invariant: bool) -> Packed:
    weight = packable(dense(weight))
    heads, columns, inner = weight.shape
    data = large_empty(heads, -(-columns // panel()) * panel() * inner, dtype=weight.dtype)
    for head, to in zip(weight, data, strict=True):
        weighted("pack_weight", weight.dtype)(head.data_ptr(), columns, inner, to.data_ptr())
    return Packed(data, columns, inner)


def run(x: Tensor, packed: Packed, to: Tensor | None = None) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    rows, heads, columns = x.shape[0], x.shape[1], packed.columns
    y = torch.empty(rows, heads, columns) if to is None else to
    weighted("gemm", packed.data.dtype)(
        *(x.data_ptr(), x.stride(0), x.stride(1), packed.data.data_ptr()),
        *(y.data_ptr(), y.stride(0), y.stride(1), heads, rows, columns, packed.inner),
    )
    return y
