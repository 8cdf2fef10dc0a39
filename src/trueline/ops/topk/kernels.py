"""The k-th largest is found by halving the range of integers that order as scores do, with all
scores of a chunk in registers; a running count then puts what is chosen in its place."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait

_ABSENT = tl.constexpr(-(2**31))
_SIXTEEN = tl.constexpr(16)


@triton.jit
def _keys(scores, source, start, stop, PADDED: tl.constexpr, TILE: tl.constexpr):
    """Integers that order as the scores at start..stop do, and their positions. Both zeros are one
    number, NaN is -Inf, and below all is what is absent. `source` holds positions, -1 for none.
    Scores that are PADDED may be read up to a multiple of four: in fours, therefore."""
    at = start + tl.arange(0, TILE)
    there = at < stop
    position = at
    if source is not None:
        position = tl.load(source + at, mask=there, other=-1)
        there = position >= 0
        score = tl.load(scores + position, mask=there, other=0.0)
    elif PADDED:
        score = tl.load(scores + at, mask=at < (stop + 3) // 4 * 4, other=0.0)
    else:
        score = tl.load(scores + at, mask=there, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), _ABSENT), position


@triton.jit
def _threshold(
    scores, source, start, stop, topk, PADDED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A key, how many equal to it are chosen beside all larger ones, and how many are chosen in
    all."""
    key, _ = _keys(scores, source, start, stop, PADDED, TILE)
    total = tl.sum((key != _ABSENT).to(tl.int32), 0)
    # at least topk are >= low, fewer than topk are >= high
    low = tl.min(tl.where(key == _ABSENT, 2**31 - 1, key), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1
    at_low, at_high = total, total * 0
    while (high - low > 1) & (at_low > topk):
        middle = (low + high) >> 1
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = count >= topk
        low, at_low = tl.where(enough, middle, low), tl.where(enough, count, at_low)
        high, at_high = tl.where(enough, high, middle), tl.where(enough, at_high, count)
    return low.to(tl.int32), topk - at_high, tl.minimum(total, topk)


@kernel(do_not_specialize=["source_row"], do_not_specialize_on_alignment=["lengths"])
def select(
    scores, row_stride, lengths, source, source_row, out, topk,
    PADDED: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """The best of one chunk of a row, of its scores or of what `source` has left of them. A row
    that sees no more than topk positions has no scores."""
    pdl_wait(False)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    column = tl.arange(0, WIDTH)
    to = out + (row * tl.num_programs(1) + chunk) * topk
    if length <= topk:
        if FINAL:
            tl.store(to + column, tl.where(column < length, column, -1), mask=column < topk)
        return
    scores += row * row_stride
    start, stop = chunk * CHUNK, tl.minimum(length, (chunk + 1) * CHUNK)
    if source is not None:
        source += row * source_row
        stop = tl.minimum(source_row, (chunk + 1) * CHUNK)
    if stop - start <= CHUNK // 4:
        least, limit, chosen = _threshold(scores, source, start, stop, topk, PADDED, CHUNK // 4)
    else:
        least, limit, chosen = _threshold(scores, source, start, stop, topk, PADDED, CHUNK)
    larger, equal = 0, 0
    for begin in range(start, stop, PART):
        key, position = _keys(scores, source, begin, stop, PADDED, PART)
        # both counts in one: a part is smaller than 2**16
        counts = tl.cumsum((key > least).to(tl.int32) + ((key == least).to(tl.int32) << _SIXTEEN))
        of_equal = equal + (counts >> _SIXTEEN)
        place = larger + (counts & 0xFFFF) + tl.minimum(of_equal, limit) - 1
        mine = (key > least) | ((key == least) & (of_equal <= limit))
        tl.store(to + place, position, mask=mine & (key != _ABSENT))
        larger += tl.sum((key > least).to(tl.int32), 0)
        equal += tl.sum((key == least).to(tl.int32), 0)
    tl.store(to + column, column * 0 - 1, mask=(column >= chosen) & (column < topk))
