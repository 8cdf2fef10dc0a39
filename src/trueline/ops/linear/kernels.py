# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait


@kernel(do_not_specialize=["rows"])
def stream(
    x, x_row, x_head, weight, out, out_row, out_head, rows, width, depth,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, width] = x [rows, heads, depth] times weight [heads, width, depth]. A
    program has BLOCK_N rows of a head's weight, all of them in registers: nobody writes weights, so
    their loads are issued before the kernel that computes x ends."""
    head = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inside = inner < depth
    at = (head.to(tl.int64) * width + tl.minimum(columns, width - 1))[:, None] * depth
    tile = tl.load(weight + at + inner[None, :], mask=inside[None, :], other=0)
    pdl_wait()
    x += head * x_head
    out += head * out_head
    for row in tl.static_range(ROWS):
        there = inside & (row < rows)
        value = tl.load(x + row * x_row + inner, mask=there, other=0)
        y = tl.sum(tile.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
        to = out + row * out_row + columns
        tl.store(to, y.to(out.dtype.element_ty), mask=(columns < width) & (row < rows))
