"""Rows are cut into chunks of tokens, a program each; a last program per row joins its chunks."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.sampling import GOLDEN, MULTIPLIERS, SHIFTS

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in SHIFTS)
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _first_of_largest(values, ids):
    """The largest value and the lowest id that has it."""
    most = tl.max(values, 0)
    return most, tl.min(tl.where(values == most, ids, _NOWHERE), 0)


@triton.jit
def best(
    logits,
    row_stride,
    stride,
    values,
    ids,
    vocab_size,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Per chunk: the largest logit, +Inf where anything is NaN, and the first token that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = tl.full([TILE], float("-inf"), DTYPE)
    at = tl.full([TILE], _NOWHERE, tl.int32)
    for start in tl.static_range(0, CHUNK, TILE):
        token = chunk * CHUNK + start + tl.arange(0, TILE)
        place = row * row_stride + token.to(tl.int64) * stride
        x = tl.load(logits + place, mask=token < vocab_size, other=float("-inf")).to(DTYPE)
        x = tl.where(x == x, x, float("inf"))
        larger = x > most
        most = tl.where(larger, x, most)
        at = tl.where(larger, token, at)
    found, first = _first_of_largest(most, at)
    place = row * tl.num_programs(1) + chunk
    tl.store(values + place, found)
    tl.store(ids + place, first)


@triton.jit
def _mixed(z):
    z = (z ^ (z >> _SHIFT_1)) * _FIRST
    z = (z ^ (z >> _SHIFT_2)) * _SECOND
    return z ^ (z >> _SHIFT_3)


@triton.jit
def _noise(key, token):
    bits = _mixed(key + (token + 1).to(tl.uint64) * _GOLDEN) >> 12
    uniform = bits.to(tl.int64).to(tl.float64) * 2.0**-52 + 2.0**-53
    return -tl.log(-tl.log(uniform))


@triton.jit
def noisy(
    logits,
    row_stride,
    stride,
    most,
    temperature,
    seed,
    position,
    min_p,
    values,
    ids,
    vocab_size,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Per chunk of a row with a temperature: the largest scaled logit + noise, and whose it is.
    `most` holds the chunks' largest logits."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    warmth = tl.load(temperature + row)
    if warmth == 0:
        return
    each = tl.arange(0, CHUNKS)
    of_chunks = tl.load(most + row * chunks + each, mask=each < chunks, other=float("-inf"))
    peak = tl.max(of_chunks, 0).to(tl.float64)
    floor = float("-inf") if min_p is None else tl.log(tl.load(min_p + row))
    key = _mixed(tl.load(seed + row).to(tl.uint64, bitcast=True) + _GOLDEN)
    key = _mixed(key + (tl.load(position + row) + 1).to(tl.uint64, bitcast=True) * _GOLDEN)
    found = tl.full([TILE], float("-inf"), tl.float64)
    at = tl.full([TILE], _NOWHERE, tl.int32)
    for start in range(0, CHUNK, TILE):
        token = chunk * CHUNK + start + tl.arange(0, TILE)
        place = row * row_stride + token.to(tl.int64) * stride
        x = tl.load(logits + place, mask=token < vocab_size, other=float("-inf"))
        x = (x.to(tl.float64) - peak) / warmth
        x = tl.where(x < floor, float("-inf"), x + _noise(key, token))
        larger = x > found
        found = tl.where(larger, x, found)
        at = tl.where(larger, token, at)
    largest, first = _first_of_largest(found, at)
    tl.store(values + row * chunks + chunk, largest)
    tl.store(ids + row * chunks + chunk, first)


@triton.jit
def settle(
    most,
    ids,
    temperature,
    scores,
    drawn_ids,
    tokens,
    bad,
    chunks,
    DRAWN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    inside, place = each < chunks, row * chunks + each
    values = tl.load(most + place, mask=inside, other=float("-inf"))
    peak, token = _first_of_largest(values, tl.load(ids + place, mask=inside, other=_NOWHERE))
    if DRAWN and tl.load(temperature + row) != 0:
        scored = tl.load(scores + place, mask=inside, other=float("-inf"))
        _, token = _first_of_largest(
            scored, tl.load(drawn_ids + place, mask=inside, other=_NOWHERE)
        )
    broken = (peak == float("inf")) | (peak == float("-inf"))
    tl.store(tokens + row, tl.where(broken, 0, token).to(tl.int64))
    tl.store(bad + row, broken)


@triton.jit
def mass(
    logits,
    row_stride,
    stride,
    tokens,
    most,
    sums,
    above,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """Per chunk: the largest logit, +Inf where anything is NaN; the sum of exp(logit - largest);
    how many are above the row's token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    base = logits + row * row_stride
    x = tl.load(base + token.to(tl.int64) * stride, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    given = tl.load(base + tl.load(tokens + row) * stride).to(tl.float32)
    peak = tl.max(x, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    terms = tl.exp((x - shift).to(tl.float64))
    place = row * tl.num_programs(1) + chunk
    tl.store(most + place, peak)
    tl.store(sums + place, tl.sum(terms, 0))
    tl.store(above + place, tl.sum((x > given).to(tl.int32), 0))


@triton.jit
def join(
    logits,
    row_stride,
    stride,
    tokens,
    most,
    sums,
    above,
    totals,
    logprobs,
    ranks,
    bad,
    chunks,
    CHUNKS: tl.constexpr,
):
    """Of a bad row the logprob is NaN and the rank 0."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    inside, place = each < chunks, row * chunks + each
    peaks = tl.load(most + place, mask=inside, other=float("-inf"))
    peak = tl.max(peaks, 0)
    broken = (peak == float("inf")) | (peak == float("-inf"))
    peak = tl.where(broken, 0.0, peak)
    parts = tl.load(sums + place, mask=inside, other=0.0)
    scaled = tl.where(inside & (peaks != float("-inf")), tl.exp((peaks - peak).to(tl.float64)), 0.0)
    total = peak.to(tl.float64) + tl.log(tl.sum(parts * scaled, 0))
    given = tl.load(logits + row * row_stride + tl.load(tokens + row) * stride).to(tl.float32)
    rank = 1 + tl.sum(tl.load(above + place, mask=inside, other=0), 0)
    logprob = (given.to(tl.float64) - total).to(tl.float32)
    tl.store(totals + row, total)
    tl.store(logprobs + row, tl.where(broken, float("nan"), logprob))
    tl.store(ranks + row, tl.where(broken, 0, rank).to(tl.int64))
    tl.store(bad + row, broken)
