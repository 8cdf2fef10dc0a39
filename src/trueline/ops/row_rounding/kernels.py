# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rows through codes and back, in registers. Bit by bit what torch gives on any machine."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.fp8 import LARGEST as LARGEST_E4M3
from trueline.ops.fp8 import SMALLEST as FLOOR_E4M3
from trueline.ops.fp8 import rounded as nearest_e4m3
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import power_of_two_above

LARGEST_E2M1 = tl.constexpr(6.0)
FLOOR_E2M1 = tl.constexpr(6 * 2.0**-126)


@triton.jit
def short(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def nearest_e2m1(x):
    """Numbers up to 6: one digit after the first, nothing below 2^-1."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # adding so much leaves no room for more digits
    shift = tl.maximum(power, 1.0) * 6291456.0
    return (x + shift) - shift


@triton.jit
def power_scales(groups, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """[groups, channels] of powers of two; NaN where there is an infinity or a NaN."""
    size = tl.abs(groups)
    sound = tl.sum(((size != size) | (size == float("inf"))).to(tl.int32), 1) == 0
    wanted = tl.div_rn(tl.maximum(tl.max(size, 1), FLOOR), LARGEST)
    scales = tl.where(sound, power_of_two_above(wanted), float("nan"))
    return tl.broadcast_to(scales[:, None], groups.shape)


@kernel
def round_keys(
    rows, out, rows_row,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    at, to = rows + row * rows_row, out + row * (PLAIN + ROPE)
    channel = tl.arange(0, BLOCK)
    x = short(tl.load(at + channel, mask=channel < PLAIN, other=0))
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    scales = power_scales(groups, LARGEST_E4M3, FLOOR_E4M3)
    y = nearest_e4m3(tl.div_rn(groups, scales)) * scales
    tl.store(to + channel, tl.reshape(y, (BLOCK,)).to(out.dtype.element_ty), mask=channel < PLAIN)
    turned = PLAIN + tl.arange(0, ROPE_BLOCK)
    inside = turned < PLAIN + ROPE
    x = short(tl.load(at + turned, mask=inside, other=0))
    tl.store(to + turned, x.to(out.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["count"])
def round_index(
    rows, out, count, scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, DIGITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """DIM is 2^DIGITS. Each pass makes sums and differences of neighbours, sums first: that turns
    the digits of a channel's number by one place."""
    pdl_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    inside = row[:, None] < count
    x = short(tl.load(rows + at, mask=inside, other=0))
    for _ in tl.static_range(DIGITS):
        a, b = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, DIM))
    groups = tl.reshape(short(x * scale), (ROWS * DIM // GROUP, GROUP))
    scales = power_scales(groups, LARGEST_E2M1, FLOOR_E2M1)
    y = tl.reshape(nearest_e2m1(tl.div_rn(groups, scales)) * scales, (ROWS, DIM))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
