# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Activations in fp8, as the published inference of block fp8 has them: a scale for each token and
128 numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.cache.layout import AMAX_FLOOR, STORAGES
from trueline.ops.experts.pairs import expert_of
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import power_of_two_above, swiglu

E4M3 = STORAGES["e4m3fn"].fp8
assert E4M3 is not None
LARGEST = tl.constexpr(E4M3.largest)
SMALLEST = tl.constexpr(AMAX_FLOOR)
"""Largest number of a group that is taken for what it is; of less, for this."""


@triton.jit
def in_groups(
    at, column, depth,
    GATED: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """[BLOCK / GROUP, GROUP] numbers of a row; GATED: silu of a gate × what it lets pass."""
    inside = column < depth
    value = tl.load(at + column, mask=inside, other=0).to(tl.float32)
    if GATED:
        passed = tl.load(at + depth + column, mask=inside, other=0).to(tl.float32)
        value = swiglu(value, passed, LIMIT)
    return tl.reshape(value, (BLOCK // GROUP, GROUP))


@triton.jit
def scales_of(groups, POWERS: tl.constexpr):
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(groups), axis=1), SMALLEST), LARGEST)
    return power_of_two_above(scale) if POWERS else scale


@triton.jit
def rounded(x):
    """Numbers up to 448 as e4m3 has them: three digits after the first, nothing below 2^-9."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # adding so much leaves no room for more digits
    shift = tl.maximum(power, 0.015625) * 1572864.0
    return (x + shift) - shift


@kernel(do_not_specialize=["x_row", "scale_row", "first", "held"])
def quantise(
    x, x_row, out, scales, scale_row, depth, ids, places, first, held,
    TOP: tl.constexpr, SHARED: tl.constexpr, PLACED: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, POWERS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [rows, depth] = x in fp8; scales [depth / GROUP, scale_row], powers of two if POWERS. Bit
    by bit what float32 gives on any machine. PLACED: the row of each of a token's pairs is the one
    that `places` says. GATED: x has 2 depth columns, a gate and what it lets pass,
    clamped to a LIMIT."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    groups = in_groups(x + row * x_row, column, depth, GATED, LIMIT, BLOCK, GROUP)
    scale = scales_of(groups, POWERS)
    exact = tl.div_rn(groups, tl.broadcast_to(scale[:, None], (BLOCK // GROUP, GROUP)))
    codes = tl.reshape(exact, (BLOCK,)).to(out.dtype.element_ty)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    inside, group_inside = column < depth, group * GROUP < depth
    if PLACED:
        for choice in tl.static_range(TOP + SHARED):
            pair = tl.program_id(0) * (TOP + SHARED) + choice
            here = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED) >= 0
            to = tl.load(places + pair, mask=here, other=0).to(tl.int64)
            tl.store(out + to * depth + column, codes, mask=inside & here)
            tl.store(scales + group * scale_row + to, scale, mask=group_inside & here)
    else:
        tl.store(out + row * depth + column, codes, mask=inside)
        tl.store(scales + group * scale_row + row, scale, mask=group_inside)


@kernel(do_not_specialize=["x_row"])
def through_fp8(
    x, x_row, out, depth, POWERS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """out [rows, depth] = code × scale, for weights whose blocks the fp8 GEMM does not take."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    groups = in_groups(x + row * x_row, column, depth, False, None, BLOCK, GROUP)
    scale = tl.broadcast_to(scales_of(groups, POWERS)[:, None], (BLOCK // GROUP, GROUP))
    y = tl.reshape(rounded(tl.div_rn(groups, scale)) * scale, (BLOCK,))
    tl.store(out + row * depth + column, y.to(out.dtype.element_ty), mask=column < depth)


@kernel(do_not_specialize=["first", "held"])
def combine(
    x, ids, weights, places, out, first, held, hidden,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [tokens, hidden] = the sum over a token's pairs, in their order, of weight × the row that
    `places` says."""
    pdl_wait()
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP + SHARED):
        pair = token * (TOP + SHARED) + choice
        here = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED) >= 0
        weight = 1.0
        if choice < TOP:
            weight = tl.load(weights + token * TOP + choice)
        place = tl.load(places + pair, mask=here, other=0).to(tl.int64)
        at = x + place * hidden + column
        acc += weight * tl.load(at, mask=here & (column < hidden), other=0).to(tl.float32)
    to = out + token.to(tl.int64) * hidden + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=column < hidden)
