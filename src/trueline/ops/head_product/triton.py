"""Few rows in a kernel of ours; more of them, and float32, as batched products of cuBLAS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.ops.launch import num_sms, refusals
from trueline.ops.linear import triton as linear_triton

__all__ = ["pack", "refusals", "run", "run_with"]

MOST_ROWS = 64


def pack(weight: Tensor, linear: Any, steady: bool) -> Tensor:
    return weight.contiguous()


def run(x: Tensor, packed: Tensor, to: Tensor | None = None) -> Tensor:
    heads, columns, _ = packed.shape
    y = x.new_empty(len(x), heads, columns) if to is None else to
    if y.stride(2) != 1:
        return y.copy_(run(x, packed))
    if len(x) <= MOST_ROWS and x.dtype in linear_triton.HALVES:
        return run_with(
            linear_triton.launch(len(x), columns, heads, num_sms(x.device)), x, packed, y
        )
    torch.bmm(x.transpose(0, 1), packed.mT, out=y.transpose(0, 1))
    return y


def run_with(how: linear_triton.Launch, x: Tensor, packed: Tensor, to: Tensor) -> Tensor:
    linear_triton.product(how, x, packed, to)
    return to
