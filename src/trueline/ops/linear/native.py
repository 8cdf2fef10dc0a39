"""Our own kernel: reads weights at the memory's speed for few rows, computes at the cores' speed
for many, and a row's bits depend on nothing but the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.device import large_empty
from trueline.native import packable, panel, scaled, weighted
from trueline.ops.linear import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["native"]


@dataclass(frozen=True, slots=True)
class Packed:
    data: Tensor
    columns: int
    inner: int


def pack(weight: Weight | Tensor) -> Packed:
    columns, inner = weight.shape
    if stored := scaled.as_stored(weight):
        data = scaled.pack(stored, scaled.columns_of(columns), large_empty)
        return Packed(data, columns, inner)
    weight = packable(dense(weight))
    data = large_empty(-(-columns // panel()) * panel() * inner, dtype=weight.dtype)
    weighted("pack_weight", weight.dtype)(weight.data_ptr(), columns, inner, data.data_ptr())
    return Packed(data, columns, inner)


def run(x: Tensor, packed: Packed) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape[0], packed.columns
    y = torch.empty(rows, columns)
    weighted("gemm", packed.data.dtype)(
        *(x.data_ptr(), x.stride(0), 0, packed.data.data_ptr(), y.data_ptr(), columns, 0),
        *(1, rows, columns, packed.inner),
    )
    return y


def run_wide(x: Tensor, packed: Packed) -> Tensor:
    return run(x, packed).float()
