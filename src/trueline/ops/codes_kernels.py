# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with codes (ops/codes.py) in Triton: they become numbers in registers, each rounded once
to the dtype of x, as if they had been dequantised at load."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(code, FORM: tl.constexpr):
    """uint8 codes as float32: shifted to where its exponent and fraction are, times a power of two
    that makes up for the other bias, and makes subnormal numbers normal."""
    bits = code.to(tl.int32)
    if FORM == "int4":
        return (bits - 8).to(tl.float32)
    if FORM == "fp4":
        number = ((bits & 8) << 28) | ((bits & 7) << 22)
        return number.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    number = ((bits & 128) << 24) | ((bits & 127) << 20)
    return number.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def scale_of(at, inside, FORM: tl.constexpr):
    stored = tl.load(at, mask=inside, other=0)
    if FORM != "fp4":
        return stored.to(tl.float32)
    bits = stored.to(tl.int32)  # an exponent; float32 has 2^-127 as a subnormal number
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def coded_product(
    x_at, weight_at, scale_at, live, depth, SWAP: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]; of 4-bit codes the even columns are one product, the odd ones another."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    EACH: tl.constexpr = 1 if FORM == "fp8" else 2
    byte = tl.arange(0, BLOCK_K)
    for k in range(0, tl.cdiv(depth, EACH), BLOCK_K):
        column = (k + byte) * EACH
        inside = (column < depth)[None, :]
        code = tl.load(weight_at[:, None] + (k + byte)[None, :], mask=inside, other=0)
        for odd in tl.static_range(EACH):
            there = column + odd < depth
            at = scale_at[:, None] + ((column + odd) // GROUP)[None, :]
            scale = scale_of(at, there[None, :], FORM)
            a = tl.load(
                x_at[:, None] + (column + odd)[None, :],
                mask=live[:, None] & there[None, :],
                other=0,
            )
            mine = code
            if EACH == 2:
                mine = (code >> 4) if odd else (code & 15)
            b = tl.where(there[None, :], decoded(mine, FORM) * scale, 0.0).to(a.dtype)
            if SWAP:
                acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
            else:
                acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    return acc
