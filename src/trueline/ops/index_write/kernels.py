"""A program per token: its norm, its rotation and its bytes."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.index_scores.kernels import channel_places, key_places, scale_places
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import fp8_scale


@triton.jit
def _partners(channel, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The channel that each is rotated with, the angle, and the sign of that channel's term."""
    if INTERLEAVED:
        other, angle, first = channel ^ 1, channel // 2, channel % 2 == 0
    else:
        first = channel < ROPE // 2
        other = tl.where(first, channel + ROPE // 2, channel - ROPE // 2)
        angle = channel % (ROPE // 2)
    rotated = channel < ROPE
    return tl.where(rotated, other, channel), angle, tl.where(first, -1.0, 1.0), rotated


@triton.jit
def _normed(key, norm, bias, channel, inside, mean, share):
    """A key's numbers after the norm, rounded to what it came in."""
    x = tl.load(key + channel, mask=inside, other=0.0)
    weight = tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return ((x.to(tl.float32) - mean) * share * weight + shift).to(x.dtype).to(tl.float32)


@kernel
def write(
    key, key_row, keys, scales, cells, norm, bias, cos, sin, cos_row, sin_row, eps,
    INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKEN: tl.constexpr,
    KEY: tl.constexpr, ITEM: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    key += token * key_row
    x = tl.load(key + channel, mask=inside, other=0.0)
    mean = tl.sum(x.to(tl.float32), 0) / DIM
    off = tl.where(inside, x.to(tl.float32) - mean, 0.0)
    share = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(off * off, 0) / DIM + eps))
    other, angle, sign, rotated = _partners(channel, ROPE, INTERLEAVED)
    own = _normed(key, norm, bias, channel, inside, mean, share)
    others = _normed(key, norm, bias, other, rotated, mean, share)
    c = tl.load(cos + token * cos_row + angle, mask=rotated, other=1.0)
    s = tl.load(sin + token * sin_row + angle, mask=rotated, other=0.0)
    made = (own * c + sign * others * s).to(x.dtype)
    cell = tl.load(cells + token).to(tl.int64)
    block, place = cell // SIZE, cell % SIZE
    if scales is not None:
        scale = fp8_scale(made.to(tl.float32), inside, LARGEST, POWER_OF_TWO)
        tl.store(scales + scale_places(block, place, KIND, SIZE, BLOCK, TOKEN, KEY), scale)
        made = tl.div_rn(made.to(tl.float32), scale)
    at = key_places(block, place, KIND, BLOCK, TOKEN, KEY, ITEM)
    to = keys + at + channel_places(channel, KIND, ITEM)
    tl.store(to, made.to(keys.dtype.element_ty), mask=inside)


@kernel
def rotate(
    q, q_row, q_head, out, cos, sin, cos_row, sin_row, heads,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (channel < DIM)[None, :]
    other, angle, sign, rotated = _partners(channel, ROPE, INTERLEAVED)
    c = tl.load(cos + token * cos_row + angle, mask=rotated, other=1.0)
    s = tl.load(sin + token * sin_row + angle, mask=rotated, other=0.0)
    start = q + token * q_row + head[:, None] * q_head
    own = tl.load(start + channel[None, :], mask=inside, other=0.0)
    others = tl.load(start + other[None, :], mask=inside & rotated[None, :], other=0.0)
    made = own.to(tl.float32) * c[None, :] + others.to(tl.float32) * (sign * s)[None, :]
    to = out + (token * heads + head[:, None]) * DIM + channel[None, :]
    tl.store(to, made.to(own.dtype), mask=inside)
