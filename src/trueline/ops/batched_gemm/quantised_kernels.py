# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A GEMM per head with block fp8 as it is stored: codes, which 16 bits hold exactly, are multiplied
as they are, and each sum over a block's columns by the block's scale, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.device import interpreting
from trueline.ops.jit import kernel, pdl_wait

# Four e4m3 codes become bfloat16: shifted to where its sign, exponent and fraction are, times 2^120
# for the other bias. By way of float16, as the compiler does it, a product of few rows takes twice
# as long as reading its weights.
BFLOAT16 = tl.constexpr("""{
    .reg .b32 a, b, s, t, unit;
    mov.b32 unit, 0x7B807B80;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 s, a, 0x80008000;
    and.b32 t, b, 0x80008000;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 a, a, 0x07F007F0, s, 0xEA;
    lop3.b32 b, b, 0x07F007F0, t, 0xEA;
    mul.rn.bf16x2 $0, a, unit;
    mul.rn.bf16x2 $1, b, unit;
}""")
INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def numbers(codes, dtype: tl.constexpr):
    if INTERPRETED or dtype != tl.bfloat16:
        made = codes.to(dtype)
    else:
        made = tl.inline_asm_elementwise(
            BFLOAT16, "=r,=r,r", [codes.to(tl.uint8, bitcast=True)], tl.bfloat16, is_pure=True,
            pack=4,
        )  # fmt: skip
    return made


@kernel(do_not_specialize=["rows"])
def grouped_product(
    x, x_row, x_head, codes, scales, out, out_row, out_head, parts, arrived, rows, heads, width,
    depth, SPLIT: tl.constexpr, SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, width] = x [rows, heads, depth] × codes [heads, width, depth], which have a
    scale for SIDE rows and columns. A program has BLOCK_N of the width, BLOCK_M rows and one of
    SPLIT parts of the depth; parts: float32 [SPLIT, rows, heads, width], added up in their order by
    the program that ends last. arrived: a zero for each tile, and zero again at the end."""
    pdl_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, part = tl.program_id(1) // SPLIT, tl.program_id(1) % SPLIT
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, SIDE)
    steps = depth // SIDE
    first, last = part * steps // SPLIT, (part + 1) * steps // SPLIT
    live, inside = m < rows, n < width
    code_at = codes + (head.to(tl.int64) * width + n)[:, None] * depth + inner[None, :]
    x_at = x + m.to(tl.int64)[:, None] * x_row + head.to(tl.int64) * x_head + inner[None, :]
    block = head * (width // SIDE) + tl.program_id(0) * BLOCK_N // SIDE
    scale_at = scales + block * steps
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(first, last, num_stages=STAGES):
        weight = tl.load(code_at + k * SIDE, mask=inside[:, None], other=0.0)
        value = tl.load(x_at + k * SIDE, mask=live[:, None], other=0.0)
        made = tl.dot(numbers(weight, value.dtype), tl.trans(value), input_precision="ieee")
        acc += made * tl.load(scale_at + k)
    written = inside[:, None] & live[None, :]
    to = out + m.to(tl.int64)[None, :] * out_row + head.to(tl.int64) * out_head + n[:, None]
    if SPLIT == 1:
        tl.store(to, acc.to(out.dtype.element_ty), mask=written)
    else:
        size = rows.to(tl.int64) * heads * width
        kept = parts + (m.to(tl.int64)[None, :] * heads + head) * width + n[:, None]
        tl.store(kept + part * size, acc, mask=written)
        tl.debug_barrier()
        tile = tl.program_id(2) * heads + head
        tile = arrived + tile * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for each in range(SPLIT):
                acc += tl.load(kept + each * size, mask=written, other=0.0)
            tl.store(to, acc.to(out.dtype.element_ty), mask=written)
            tl.store(tile, 0)


@kernel
def dequantised(
    codes, scales, out, width, depth, SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out [width, depth], each number rounded once."""
    pdl_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < width)[:, None] & (column < depth)[None, :]
    at = row.to(tl.int64)[:, None] * depth + column[None, :]
    scale = (row // SIDE)[:, None] * (depth // SIDE) + (column // SIDE)[None, :]
    value = tl.load(codes + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(scales + scale, mask=inside, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
