"""A tile of keys meets all heads of its queries in one MMA, keys along its rows: the sum over
heads then stays within a thread and its neighbours."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from trueline.cache.layout import GROUP
from trueline.ops.jit import kernel, pdl_wait

_GROUP = tl.constexpr(GROUP)


@triton.jit
def key_places(block, place, KIND: tl.constexpr, BLOCK: tl.constexpr, TOKEN: tl.constexpr,
               KEY: tl.constexpr, ITEM: tl.constexpr):  # fmt: skip
    """Where keys start, in numbers; sizes are bytes of a block, a token and a key."""
    if KIND == "shuffled":
        within = place // _GROUP * (_GROUP * KEY // ITEM) + place % _GROUP * (_GROUP // ITEM)
    elif KIND == "planar":
        within = place * (KEY // ITEM)
    else:
        within = place * (TOKEN // ITEM)
    return block * (BLOCK // ITEM) + within


@triton.jit
def channel_places(channel, KIND: tl.constexpr, ITEM: tl.constexpr):
    """From a key's start to its numbers."""
    if KIND == "shuffled":
        piece = _GROUP // ITEM
        return channel // piece * (_GROUP * piece) + channel % piece
    return channel


@triton.jit
def scale_places(block, place, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                 TOKEN: tl.constexpr, KEY: tl.constexpr):  # fmt: skip
    """Where the scales of fp8 keys are, in float32 numbers."""
    if KIND == "rows":
        return block * (BLOCK // 4) + place * (TOKEN // 4) + KEY // 4
    return block * (BLOCK // 4) + SIZE * (KEY // 4) + place


@kernel(do_not_specialize=["most"])
def scores(
    q, q_row, q_head, weights, keys, scales, blocks, most, runs, lengths, groups, out, out_row,
    heads, topk,
    DOT: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TOKEN: tl.constexpr, KEY: tl.constexpr, ITEM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A group is up to ROWS rows of one run that follow each other, or a single row; its tiles are
    divided among as many programs as there are along the second axis."""
    pdl_wait(False)
    row, count = tl.program_id(0).to(tl.int64), 1
    if groups is not None:
        row, count = tl.load(groups + 2 * row).to(tl.int64), tl.load(groups + 2 * row + 1)
    of_group = tl.arange(0, ROWS)
    seen = tl.load(lengths + row + of_group, mask=of_group < count, other=0).to(tl.int32)
    longest = tl.max(seen, 0)
    if longest <= topk:
        return
    each = tl.arange(0, ROWS * HEADS)
    of_row, head, channel = each // HEADS, each % HEADS, tl.arange(0, WIDTH)
    there = (of_row < count) & (head < heads)
    at = q + (row + of_row)[:, None] * q_row + head[:, None] * q_head + channel[None, :]
    query = tl.load(at, mask=there[:, None] & (channel < DIM)[None, :], other=0.0).to(DOT)
    weight = tl.load(weights + (row + of_row) * heads + head, mask=there, other=0.0)
    table = blocks + tl.load(runs + row).to(tl.int64) * most
    to = out + (row + of_group) * out_row
    step = tl.num_programs(1) * TILE
    for start in tl.range(tl.program_id(1) * TILE, longest, step, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        inside = position < longest
        block = tl.load(table + position // SIZE, mask=inside, other=0).to(tl.int64)
        place = position % SIZE
        begin = key_places(block, place, KIND, BLOCK, TOKEN, KEY, ITEM)
        from_ = keys + begin[:, None] + channel_places(channel, KIND, ITEM)[None, :]
        key = tl.load(from_, mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)
        made = tl.dot(key.to(DOT), tl.trans(query), input_precision="ieee")
        made = tl.maximum(made, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        total = tl.sum(tl.reshape(made, (TILE, ROWS, HEADS)), 2)
        if scales is not None:
            scale_at = scale_places(block, place, KIND, SIZE, BLOCK, TOKEN, KEY)
            total *= tl.load(scales + scale_at, mask=inside, other=0.0)[:, None]
        tl.store(to[None, :] + position[:, None], total, mask=position[:, None] < seen[None, :])
