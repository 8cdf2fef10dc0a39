# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""x Wᵀ with the weight as it is stored."""

from __future__ import annotations

import triton.language as tl

from trueline.ops.codes_kernels import coded_product
from trueline.ops.jit import kernel, pdl_wait


@kernel(do_not_specialize=["count"])
def product(
    x, x_row, numbers, number_row, scales, scale_row, out, count, depth, width,
    SWAP: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [count, width]; a scale is that of ROWS rows of the weight and GROUP columns."""
    pdl_wait()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(columns, width - 1).to(tl.int64)
    acc = coded_product(
        x + rows.to(tl.int64) * x_row, numbers + weight_rows * number_row,
        scales + weight_rows // ROWS * scale_row, rows < count, depth, SWAP, FORM, GROUP, BLOCK_M,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    to = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)
