# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.tile import tile_product


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x, x_row, x_head, weight, out, out_row, out_head, rows, columns, depth,
    SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x Wᵀ, per head. Every warp has a slice of the inner dimension: a program then needs few
    columns to stay busy, and no sum is left for another program to finish."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    inner = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    # Columns beyond the last read the last again: nothing of it is stored.
    weight_rows = tl.minimum(n, columns - 1).to(tl.int64)[None, :, None]
    weight_at = weight + head * columns * depth + weight_rows * depth + inner
    x_at = x + head * x_head + m.to(tl.int64)[None, :, None] * x_row + inner
    live = (m < rows)[None, :, None]
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, depth, SLICES * BLOCK_K):
        inside = inner < depth - k
        a = tl.load(x_at + k, mask=live & inside, other=0)
        b = tl.load(weight_at + k, mask=inside, other=0)
        acc = tl.dot(b, tl.trans(a, 0, 2, 1), acc, input_precision="ieee")
    y = tl.trans(tl.sum(acc, axis=0))
    to = out + head * out_head + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["rows"])
def some_rows(
    x, x_row, x_head, weight, out, out_row, out_head, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The same with more rows: a program has enough to do without slices."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    weight_rows = tl.minimum(n, columns - 1).to(tl.int64)[:, None]
    weight_at = weight + head * columns * depth + weight_rows * depth + inner[None, :]
    x_at = x + head * x_head + m.to(tl.int64)[:, None] * x_row + inner[None, :]
    y = tile_product(
        x_at, weight_at, m < rows, inner, depth, True, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K
    )
    to = out + head * out_head + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])
