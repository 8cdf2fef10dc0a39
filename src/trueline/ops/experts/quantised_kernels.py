# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`kernels.grouped` with weights as they are stored; and x for weights in an order of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.codes_kernels import coded_product
from trueline.ops.experts.kernels import columns_of
from trueline.ops.experts.pairs import weight_of
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import swiglu


@kernel(do_not_specialize=["pairs"])
def grouped(
    x, x_row, numbers, number_row, scales, scale_row, scale_rows, weights, out, order, tiles,
    total, pairs, depth, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    SWAP: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `kernels.grouped`; a scale is that of ROWS rows and GROUP columns. number_row: bytes of a
    row of codes; scale_row, scale_rows: scales of a row of blocks, and such rows of an expert."""
    pdl_wait()
    column_tiles = tl.cdiv(width, BLOCK_N // 2 if GATED else BLOCK_N)
    m, n = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    if m >= tl.load(total):
        return
    expert = tl.load(tiles + m).to(tl.int64)
    rows = tl.load(order + m * BLOCK_M + tl.arange(0, BLOCK_M))
    live = rows < pairs
    columns, weight_rows = columns_of(n, width, GATED, BLOCK_N)
    all_rows = (2 if GATED else 1) * width
    weight_at = numbers + (expert * all_rows + weight_rows) * number_row
    scale_at = scales + (expert * scale_rows + weight_rows // ROWS) * scale_row
    source = (rows // (TOP + SHARED) if GATED else rows).to(tl.int64)
    acc = coded_product(
        x + source * x_row, weight_at, scale_at, live, depth, SWAP, FORM, GROUP, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        y = swiglu(gate, up, LIMIT)
    else:
        y = acc * weight_of(weights, rows, live, TOP, SHARED)[:, None]
    to = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None] & (columns < width)[None, :])


@kernel
def permute_columns(x, x_row, out, out_row, depth, BLOCK: tl.constexpr):
    """Rows of x with their columns in the order of fragments (fragment_kernels.py); zeros from
    `depth` to `out_row`."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = place // 32 * 32 + _fragment_column(place % 32)
    value = tl.load(x + row * x_row + column, mask=column < depth, other=0)
    tl.store(out + row * out_row + place, value, mask=place < out_row)


@triton.jit
def _fragment_column(place):
    """The one of 32 that stands at 16 j + 8 h + 2 q + e: 8 q + 4 j + 2 h + e."""
    return place // 2 % 4 * 8 + place // 16 * 4 + place // 8 % 2 * 2 + place % 2
