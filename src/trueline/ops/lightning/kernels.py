"""Linear attention in Triton. Decays are exp(-slope · distance) of distances >= 0 only, so that
none overflows, however strong."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait


@triton.jit
def decay(exponent):
    """exp(-exponent) as keep and loss: S times it is T + loss · T with T = keep · S. A factor near
    1 is not applied as such: rounded to float32 it would err to the same side at every token."""
    weak = exponent < 0.69
    x = tl.where(weak, -exponent, 0.0)
    series = x * 0.0 + 1.0
    for n in tl.static_range(10, 1, -1):
        series = 1.0 + series * x * (1.0 / n)
    return tl.where(weak, 1.0, tl.exp(-exponent)), x * series


@triton.jit
def faded(state, exponent):
    keep, loss = decay(exponent)
    kept = state * keep
    return kept + kept * loss


@triton.jit
def inside(a, b, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Which of a tile's numbers there are; decided at compile time where that is all of them."""
    within = tl.full((BK, BV), True, tl.int1)
    if DK % BK != 0:
        within &= (a < DK)[:, None]
    if DV % BV != 0:
        within &= (b < DV)[None, :]
    return within


@kernel(do_not_specialize=["starts", "sources", "slots", "snapshots"])
def decode_step(
    q, k, v, out, state, starts, sources, slots, snapshots, slopes, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, slot_size,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token of a row, for some value channels of a head. Safe without a barrier between
    programs: this slice of a slot that is written belongs to this program alone, and its source is
    either that slot, read here before it is written, or one that nobody writes (`prepare` has
    brought the others)."""
    pdl_wait()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    a, b = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = a < DK, b < DV
    # All loads before the first use of one: a use may bring a barrier, which loads do not pass.
    started, source = tl.load(starts + row) > 0, tl.load(sources + row).to(tl.int64)
    slot, snapshot = tl.load(slots + row).to(tl.int64), tl.load(snapshots + row).to(tl.int64)
    slope = tl.load(slopes + head)
    query = tl.load(q + row * q_row + head * q_head + a, mask=in_k, other=0.0)
    key = tl.load(k + row * k_row + head * k_head + a, mask=in_k, other=0.0)
    value = tl.load(v + row * v_row + head * v_head + b, mask=in_v, other=0.0)
    place = head * DK * DV + a[:, None] * DV + b[None, :]
    within = inside(a, b, DK, DV, BK, BV)
    held = tl.load(state + source * slot_size + place, mask=within & started, other=0.0)
    new = faded(held.to(tl.float32), slope)
    new += key.to(tl.float32)[:, None] * value.to(tl.float32)[None, :]
    tl.store(state + slot * slot_size + place, new, mask=within)
    if snapshot > 0:
        tl.store(state + snapshot * slot_size + place, new, mask=within)
    total = tl.sum(query.to(tl.float32)[:, None] * new, axis=0) * scale
    tl.store(out + (row * tl.num_programs(1) + head) * DV + b, total, mask=in_v)


@triton.jit
def among(here, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    within = here[:, None]
    if WIDTH % BLOCK != 0:
        within = within & (channels < WIDTH)[None, :]
    return within


@triton.jit
def tokens(x, start, row, t, here, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Some channels of a chunk's tokens, zeros after its last."""
    within = among(here, channels, WIDTH, BLOCK)
    return tl.load(x + start * row + (t * row)[:, None] + channels[None, :], within, other=0.0)


@triton.jit
def narrowed(state, dtype: tl.constexpr):
    """An operand of an MMA in `dtype`, and the unit it is in: float16 reaches only so far, and a
    state without decay grows with its context."""
    unit = 1.0
    if dtype == tl.float16:
        unit = tl.maximum(tl.max(tl.max(tl.abs(state), 1), 0), 1e-30) * 0.001
        state = state / unit
    return state.to(dtype), unit


@triton.jit
def advanced(carried, keys, values, t, count, slope, EXACT: tl.constexpr):
    """The state after a chunk of `count` tokens. EXACT: with the digits of the decayed values that
    their dtype cuts off, too."""
    late = values.to(tl.float32) * tl.exp(-slope * tl.maximum(count - 1 - t, 0))[:, None]
    near = late.to(values.dtype)
    carried = faded(carried, slope * count)
    carried = tl.dot(tl.trans(keys), near, carried, input_precision="ieee")
    if EXACT:
        rest = (late - near.to(tl.float32)).to(values.dtype)
        carried = tl.dot(tl.trans(keys), rest, carried, input_precision="ieee")
    return carried


@kernel(do_not_specialize=["walks", "followed", "sources", "firsts", "stops", "slots"])
def walk(
    q, k, v, out, state, sums, walks, followed, sources, firsts, stops, slots, slopes, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, slot_size,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    OUTPUT: tl.constexpr, FROM_SLOT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The legs of a walk, chunk after chunk, for some value channels of a head, the state in
    registers. With OUTPUT: from a slot or from `sums` on, to outputs and the slots that take what
    a leg has reached. Without: from zeros on, to what the walk adds to the state, into `sums`;
    not for the last of a row."""
    pdl_wait()
    tile, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not OUTPUT:
        number = tl.load(followed + number)
    first_leg, last_leg = tl.load(walks + number), tl.load(walks + number + 1)
    slope = tl.load(slopes + head)
    t, a, b = tl.arange(0, CHUNK), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    place = head * DK * DV + a[:, None] * DV + b[None, :]
    within = inside(a, b, DK, DV, BK, BV)
    mine = sums + number.to(tl.int64) * slot_size + place
    if FROM_SLOT:
        source = tl.load(sources + number).to(tl.int64)
        held = tl.load(state + source * slot_size + place, mask=within & (source >= 0), other=0.0)
        carried = held.to(tl.float32)
    elif OUTPUT:
        carried = tl.load(mine, mask=within, other=0.0)
    else:
        carried = tl.zeros((BK, BV), tl.float32)
    if OUTPUT:
        lag = t[:, None] - t[None, :]
        weights = tl.where(lag >= 0, scale * tl.exp(-slope * tl.maximum(lag, 0)), 0.0)
        carry = scale * tl.exp(-slope * (t + 1))
        row = tl.num_programs(1) * DV
    for leg in range(first_leg, last_leg):
        first, stop = tl.load(firsts + leg), tl.load(stops + leg)
        for start in range(first, stop, CHUNK):
            count = tl.minimum(stop - start, CHUNK)
            here = t < count
            at = tl.cast(start, tl.int64)
            keys = tokens(k + head * k_head, at, k_row, t, here, a, DK, BK)
            values = tokens(v + head * v_head, at, v_row, t, here, b, DV, BV)
            if OUTPUT:
                queries = tokens(q + head * q_head, at, q_row, t, here, a, DK, BK)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * weights
                narrow, unit = narrowed(carried, queries.dtype)
                made = tl.dot(queries, narrow, input_precision="ieee") * (carry * unit)[:, None]
                made = tl.dot(scores.to(values.dtype), values, made, input_precision="ieee")
                to = out + at * row + (t * row)[:, None] + head * DV + b[None, :]
                tl.store(to, made, mask=among(here, b, DV, BV))
            carried = advanced(carried, keys, values, t, count, slope, EXACT)
        if OUTPUT:
            slot = tl.load(slots + leg).to(tl.int64)
            if slot >= 0:
                tl.store(state + slot * slot_size + place, carried, mask=within)
    if not OUTPUT:
        tl.store(mine, carried, mask=within)


@kernel(do_not_specialize=["rows", "sources", "length"])
def scan(
    state, sums, rows, sources, length, slopes, slot_size,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each walk of a row adds becomes the state before it. All but the last have `length`
    tokens; what that one adds is not there, for nobody needs it."""
    pdl_wait()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(rows + row), tl.load(rows + row + 1)
    slope, source = tl.load(slopes + head), tl.load(sources + row).to(tl.int64)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    within = i < SIZE
    place = head * SIZE + i
    held = tl.load(state + source * slot_size + place, mask=within & (source >= 0), other=0.0)
    carried = held.to(tl.float32)
    at = sums + first.to(tl.int64) * slot_size + place
    added = tl.load(at, mask=within & (first + 1 < last), other=0.0)
    for number in range(first, last):
        ahead = tl.load(at + slot_size, mask=within & (number + 2 < last), other=0.0)
        tl.store(at, carried, mask=within)
        carried = faded(carried, slope * length) + added
        added = ahead
        at += slot_size
