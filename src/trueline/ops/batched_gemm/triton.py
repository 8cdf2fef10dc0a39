"""A few rows stream the weights (ops/linear/triton.py); more are cuBLAS's."""

from __future__ import annotations

from torch import Tensor

from trueline.ops.batched_gemm import IMPLEMENTATIONS, cublas
from trueline.ops.batched_gemm.cublas import pack
from trueline.ops.linear.triton import FEW_ROWS, LONGEST, streamed

__all__ = ["capabilities", "pack", "run"]

capabilities = IMPLEMENTATIONS["triton"]


def run(x: Tensor, packed: Tensor, to: Tensor | None = None) -> Tensor:
    unit = to is None or to.stride(2) == 1
    if len(x) > FEW_ROWS or x.shape[2] > LONGEST or not unit:
        return cublas.run(x, packed, to)
    y = x.new_empty(len(x), *packed.shape[:2]) if to is None else to
    streamed(x, packed, y)
    return y
