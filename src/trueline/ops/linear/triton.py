"""Few rows read the weight at the memory's speed; cuBLAS has more rows, and float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trueline.ops.launch import num_sms, power_of_two, refusals, unit_stride
from trueline.ops.linear import cublas, kernels

__all__ = ["Launch", "launch", "pack", "product", "refusals", "run", "run_with"]

MOST_ROWS = 16
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Launch:
    rows: int
    columns: int
    inner: int
    """Of one slice; a program reads all slices at a time, its warps share them."""
    slices: int = 4
    warps: int = 4
    stages: int = 4


def launch(rows: int, columns: int, heads: int, sms: int) -> Launch:
    """As many columns as leave work for most of the GPU: every program reads all of x."""
    block = min(max(power_of_two(rows), 16), 64)
    if block > 16:  # enough to do without slices
        return Launch(block, 64, 128, slices=1, stages=3)
    enough = 0.8 * sms
    for size in (64, 32):
        if heads * triton.cdiv(columns, size) >= enough:
            return Launch(block, size, 32 if size == 64 else 64)
    return Launch(block, 16, 64)


pack = cublas.pack


def run(x: Tensor, packed: Tensor) -> Tensor:
    if len(x) > MOST_ROWS or x.dtype not in HALVES:
        return cublas.run(x, packed)
    return run_with(launch(len(x), len(packed), 1, num_sms(x.device)), x, packed)


def run_with(how: Launch, x: Tensor, packed: Tensor) -> Tensor:
    y = x.new_empty(len(x), len(packed))
    product(how, x[:, None], packed[None], y[:, None])
    return y


def product(how: Launch, x: Tensor, weight: Tensor, to: Tensor) -> None:
    """x [n, heads, in], weight [heads, out, in] without gaps, to [n, heads, out]."""
    x = unit_stride(x)
    heads, columns, depth = weight.shape
    grid = (triton.cdiv(columns, how.columns), heads, triton.cdiv(len(x), how.rows))
    given = (x, x.stride(0), x.stride(1), weight, to, to.stride(0), to.stride(1))
    sizes = {"BLOCK_M": how.rows, "BLOCK_N": how.columns, "BLOCK_K": how.inner}
    options = {"num_warps": how.warps, "num_stages": how.stages}
    if how.slices == 1:
        even = depth % how.inner == 0
        kernels.some_rows[grid](*given, len(x), columns, depth, EVEN_K=even, **sizes, **options)
    else:
        kernels.few_rows[grid](
            *given, len(x), columns, depth, SLICES=how.slices, **sizes, **options
        )
