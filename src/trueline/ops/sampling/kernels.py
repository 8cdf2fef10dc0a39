"""Rows are cut into chunks of tokens, a program each; a last program per row joins its chunks.
Columns of numbers per row come in one buffer, one after the other: how they are aligned depends on
the number of rows, and is not specialized on."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.sampling import GOLDEN, MULTIPLIERS, SHIFTS

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in SHIFTS)
_NOWHERE = tl.constexpr(2**31 - 1)
_ALL = tl.constexpr(2**64 - 1)
_MARGIN = tl.constexpr(1e-3)
"""Twice the largest error of a score in float32, and more."""
_HOPELESS = tl.constexpr(-41.0)
"""Noise lies between -3.7 and 36.8: what is so far below the likeliest is never drawn."""


@triton.jit
def _first_of_largest(values, ids):
    """The largest value and the lowest id that has it."""
    most = tl.max(values, 0)
    return most, tl.min(tl.where(values == most, ids, _NOWHERE), 0)


@kernel(do_not_specialize_on_alignment=["rows"])
def masked(
    logits, row_stride, stride, rows, words, words_stride, out, vocab_size, CHUNK: tl.constexpr
):  # fmt: skip
    """What a row may draw: -Inf where its bit is not set. NaN and +Inf stay, so that the row is bad
    wherever they stand."""
    pdl_wait()
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + place)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    at = logits + row * row_stride + token.to(tl.int64) * stride
    x = tl.load(at, mask=inside, other=float("-inf"))
    word = tl.load(words + place * words_stride + token // 32, mask=inside, other=0)
    allowed = ((word >> (token % 32)) & 1) != 0
    broken = (x != x) | (x == float("inf"))
    x = tl.where(allowed | broken, x, float("-inf"))
    tl.store(out + place * vocab_size + token, x, mask=inside)


@kernel
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
    pdl_wait()
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
def _bits(key, token):
    return _mixed(key + (token + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def _score(x, peak, warmth, cutoff, key, token):
    """As the contract has it."""
    uniform = (_bits(key, token) >> 12).to(tl.int64).to(tl.float64) * 2.0**-52 + 2.0**-53
    scaled = (x.to(tl.float64) - peak.to(tl.float64)) / warmth
    return tl.where(scaled < cutoff, float("-inf"), scaled - tl.log(-tl.log(uniform)))


@triton.jit
def near_noise(bits):
    """In float32, off by less than a quarter of the margin: from the distance to the nearer end, 0
    or 1, which keeps its digits where the number itself is rounded to the end."""
    upper = (bits >> 63) != 0
    bits = tl.where(upper, bits ^ _ALL, bits)
    high, low = (bits >> 32).to(tl.int32), ((bits >> 12) & 0xFFFFF).to(tl.int32)
    end = high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-52
    series = end * (1 + end * (1 / 2 + end * (1 / 3 + end * (1 / 4))))
    log = tl.log(tl.where(upper, 1 - end, end))
    return -tl.log(tl.where(upper & (end < 2.0**-8), series, -log))


@triton.jit
def _exact_best(logits, stride, first, vocab_size, peak, warmth, cutoff, key,
                CHUNK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    found = tl.full([TILE], float("-inf"), tl.float64)
    at = tl.full([TILE], _NOWHERE, tl.int32)
    for start in range(0, CHUNK, TILE):
        token = first + start + tl.arange(0, TILE)
        place = logits + token.to(tl.int64) * stride
        x = tl.load(place, mask=token < vocab_size, other=float("-inf"))
        score = _score(x, peak, warmth, cutoff, key, token)
        larger = score > found
        found = tl.where(larger, score, found)
        at = tl.where(larger, token, at)
    return _first_of_largest(found, at)


@triton.jit
def _near_best(logits, stride, first, vocab_size, peak, warmth, cutoff, key,
               CHUNK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The likely winner in float32, and whether another token might be it."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    second = best
    at = tl.full([TILE], _NOWHERE, tl.int32)
    share, least = (1 / warmth).to(tl.float32), (cutoff - _MARGIN).to(tl.float32)
    for start in range(0, CHUNK, TILE):
        token = first + start + tl.arange(0, TILE)
        place = logits + token.to(tl.int64) * stride
        x = tl.load(place, mask=token < vocab_size, other=float("-inf"))
        scaled = (x.to(peak.dtype) - peak).to(tl.float32) * share
        near = tl.where(scaled < least, float("-inf"), scaled + near_noise(_bits(key, token)))
        larger = near > best
        second = tl.where(larger, best, tl.maximum(second, near))
        best = tl.where(larger, near, best)
        at = tl.where(larger, token, at)
    most, winner = _first_of_largest(best, at)
    close = (best >= most - _MARGIN).to(tl.int32) + (second >= most - _MARGIN).to(tl.int32)
    return winner, tl.sum(close, 0) != 1


@kernel(do_not_specialize_on_alignment=["temperature", "seed", "position", "min_p"])
def noisy(
    logits, row_stride, stride, most, temperature, seed, position, min_p, values, ids, vocab_size,
    CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Per chunk of a row with a temperature: the largest scaled logit + noise, and whose it is.
    `most` holds the chunks' largest logits. float64 is slow: most tokens are ruled out in float32,
    and where that leaves more than one, all are scored again."""
    pdl_wait()
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    warmth = tl.load(temperature + row)
    if warmth == 0:
        return
    each = tl.arange(0, CHUNKS)
    of_chunks = tl.load(most + row * chunks + each, mask=each < chunks, other=float("-inf"))
    peak = tl.max(of_chunks, 0)
    cutoff = tl.full([], float("-inf"), tl.float64)
    if min_p is not None:
        cutoff = tl.log(tl.load(min_p + row))
    to = row * chunks + chunk
    own = (tl.load(most + to).to(tl.float64) - peak.to(tl.float64)) / warmth
    if own < tl.maximum(cutoff, _HOPELESS):
        tl.store(values + to, float("-inf"))
        tl.store(ids + to, 0)
        return
    key = _mixed(tl.load(seed + row).to(tl.uint64, bitcast=True) + _GOLDEN)
    key = _mixed(key + (tl.load(position + row) + 1).to(tl.uint64, bitcast=True) * _GOLDEN)
    logits += row * row_stride
    winner, doubtful = _near_best(
        logits, stride, chunk * CHUNK, vocab_size, peak, warmth, cutoff, key, CHUNK, TILE
    )
    x = tl.load(logits + winner.to(tl.int64) * stride, mask=winner < vocab_size, other=0.0)
    score = _score(x, peak, warmth, cutoff, key, winner)
    if doubtful | (score == float("-inf")):
        score, winner = _exact_best(
            logits, stride, chunk * CHUNK, vocab_size, peak, warmth, cutoff, key, CHUNK, TILE
        )
    tl.store(values + to, score)
    tl.store(ids + to, winner)


@kernel(do_not_specialize_on_alignment=["temperature"])
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
    pdl_wait()
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


@kernel
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
    pdl_wait()
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


@kernel
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
    pdl_wait()
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
