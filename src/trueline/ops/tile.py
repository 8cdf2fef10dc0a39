# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The product of a tile, as several ops have it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_product(
    x_at, weight_at, live, inner, depth,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]. SWAP: the weights are the left operand, which must have 64 rows to run
    at full speed; tokens may then be as few as 16."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at, mask=live[:, None], other=0)
            b = tl.load(weight_at)
        else:
            inside = (inner < depth - k)[None, :]
            a = tl.load(x_at, mask=live[:, None] & inside, other=0)
            b = tl.load(weight_at, mask=inside, other=0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if SWAP:
        acc = tl.trans(acc)
    return acc
