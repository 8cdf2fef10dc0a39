# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import swiglu


@kernel
def gate(x, out, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, width] = silu(first half of x's row) × second half, clamped to a LIMIT."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + row * 2 * width + column
    inside = column < width
    g = tl.load(at, mask=inside, other=0).to(tl.float32)
    u = tl.load(at + width, mask=inside, other=0).to(tl.float32)
    y = swiglu(g, u, LIMIT)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
