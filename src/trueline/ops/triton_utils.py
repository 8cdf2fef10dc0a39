"""What several Triton kernels do with numbers that are in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from trueline.cache.layout import AMAX_FLOOR

_FLOOR = tl.constexpr(AMAX_FLOOR)
_FRACTION = tl.constexpr(2**23 - 1)


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr):
    """Of the sum of the squares of WIDTH numbers, to the last digit."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares / WIDTH + eps))


@triton.jit
def weighted(x, weight, dtype: tl.constexpr):
    """Normed numbers rounded before their weight and after it, as in Llama."""
    return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def swiglu(gate, up, LIMIT: tl.constexpr):
    """silu(gate) × up; with a LIMIT, clamped as the op mlp says, and NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def rotated(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rotate_into(x, to, cos, sin, within, SHIFT: tl.constexpr):
    """Channels at x, each with the one SHIFT after it, rotated and stored."""
    a, b = tl.load(x, mask=within, other=0.0), tl.load(x + SHIFT, mask=within, other=0.0)
    a, b = rotated(a.to(tl.float32), b.to(tl.float32), cos, sin)
    tl.store(to, a.to(x.dtype.element_ty), mask=within)
    tl.store(to + SHIFT, b.to(x.dtype.element_ty), mask=within)


@triton.jit
def fp8_scale(x, mine, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """That the numbers of x in `mine` share; NaN where there is an infinity or a NaN."""
    size = tl.where(mine, tl.abs(x), 0.0)
    sound = tl.sum(((size != size) | (size == float("inf"))).to(tl.int32), 0) == 0
    wanted = tl.div_rn(tl.maximum(tl.max(size, 0), _FLOOR), LARGEST)
    if POWER_OF_TWO:
        wanted = power_of_two_above(wanted)
    return tl.where(sound, wanted, float("nan"))


@triton.jit
def power_of_two_above(x):
    """The least that is not smaller."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + _FRACTION) & (-1 - _FRACTION)).to(tl.float32, bitcast=True)


@triton.jit
def scaled(
    codes, scales, held, channel, WIDTH: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """fp8 codes [n, channel] as numbers of `dtype`; `scales` [n] points at the first of each row.
    A scale is loaded once a row and group, not once a number."""
    each = tl.zeros(codes.shape, tl.float32)
    for group in tl.static_range((WIDTH + GROUP - 1) // GROUP):
        shared = tl.load(scales + group, mask=held, other=0.0)
        each = tl.where((channel // GROUP == group)[None, :], shared[:, None], each)
    return (codes.to(tl.float32) * each).to(dtype)
