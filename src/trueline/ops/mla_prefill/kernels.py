# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Cached rows side by side, and causal attention over keys and values made per head: i of a tile's
queries, n of its keys, p of a key's plain part, r of its rotated part, which all heads share, v of
a value."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import scaled

LN_2 = tl.constexpr(0.6931471805599453)
FIELDS = tl.constexpr(8)
"""Of a tile: see `cut.Tile`."""
BITS = tl.constexpr(32)
"""Positions a word tells of: whether a query chose them."""


@kernel
def gather(
    rows, scales, keys, blocks, places, latent, rope,
    ROW: tl.constexpr, KEY_ROW: tl.constexpr, KEY_AT: tl.constexpr, SCALE_ROW: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per COUNT positions of a row, or fewer at its end: where its blocks are listed, the
    first position, how many there are, and where they go."""
    pdl_wait()
    place = places + 4 * tl.program_id(0)
    table, first = blocks + tl.load(place), tl.load(place + 1)
    n = tl.arange(0, COUNT)
    held = n < tl.load(place + 2)
    to = (tl.load(place + 3) + n).to(tl.int64)
    block = tl.load(table + (first + n) // BLOCK, mask=held, other=0).to(tl.int64)
    cell = block * BLOCK + (first + n) % BLOCK
    l = tl.arange(0, L)  # noqa: E741
    r = tl.arange(0, R)
    mask = held[:, None] & (l < LATENT)[None, :]
    value = tl.load((rows + cell * ROW)[:, None] + l[None, :], mask=mask, other=0.0)
    if scales is not None:
        at = scales + cell * SCALE_ROW + SCALE_AT
        value = scaled(value, at, held, l, LATENT, GROUP, latent.dtype.element_ty)
    tl.store(latent + to[:, None] * LATENT + l[None, :], value, mask=mask)
    mask = held[:, None] & (r < ROPE)[None, :]
    at = (keys + cell * KEY_ROW + KEY_AT)[:, None] + r[None, :]
    value = tl.load(at, mask=mask, other=0.0)
    tl.store(rope + to[:, None] * ROPE + r[None, :], value, mask=mask)


@triton.jit
def load_tile(base, n, column, count, DIM: tl.constexpr, D: tl.constexpr, ENDS: tl.constexpr):
    """[n, column] of rows DIM wide; ENDS: there may be fewer than n."""
    at = base + (n[:, None] * DIM + column[None, :])
    if ENDS:
        return tl.load(at, mask=(n < count)[:, None] & (column < DIM)[None, :], other=0.0)
    if DIM != D:
        return tl.load(at, mask=(column < DIM)[None, :], other=0.0)
    return tl.load(at)


@kernel(do_not_specialize=["width", "positions_row", "words"])
def set_bits(
    positions, picks, bits, width, positions_row, words, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A program per row of chosen positions, of which the first -1 ends the list. A pick is ROWS
    rows or fewer: the first one's token and place in the list, how many positions it sees, and how
    many rows there are. A row's last word counts the positions that it does not see."""
    pdl_wait()
    pick = picks + tl.program_id(0) // ROWS * 4
    row = tl.program_id(0) % ROWS
    if row < tl.load(pick + 3):
        to = bits + (tl.load(pick) + row).to(tl.int64) * words
        listed = positions + (tl.load(pick + 1) + row).to(tl.int64) * positions_row
        length = tl.load(pick + 2) + row
        end = width
        unseen = tl.zeros((), tl.int32)
        for start in range(0, width, CHUNK):
            i = start + tl.arange(0, CHUNK)
            position = tl.load(listed + i, mask=i < width, other=-1)
            end = tl.minimum(end, tl.min(tl.where(position < 0, i, width), 0))
            taken = i < end
            unseen += tl.sum((taken & (position >= length)).to(tl.int32), 0)
            seen = taken & (position < length)
            bit = tl.full([CHUNK], 1, tl.int32) << (position % BITS).to(tl.int32)
            tl.atomic_or(to + position // BITS, bit, mask=seen, sem="relaxed")
        tl.store(to + words - 1, unseen)


@triton.jit
def chosen(bits, start, N: tl.constexpr):
    """[queries, N]: whether each chose keys start..start + N. `bits`: where its words begin."""
    n = tl.arange(0, N)
    at = bits + start // BITS
    word = tl.load(at)[:, None]
    for more in tl.static_range(1, N // BITS):
        word = tl.where((n < more * BITS)[None, :], word, tl.load(at + more)[:, None])
    bit = n % BITS if N >= BITS else (start + n) % BITS
    return ((word >> bit[None, :]) & 1) != 0


@triton.jit
def fold_keys(
    q_nope, q_rope, keys, ropes, values, bits, begin, end, count, limit, scale, top, norm, acc,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys begin..end, in steps of N. With ENDS, query i sees keys up to limit + i, and none from
    `count` on; without, every query sees every key. With `bits`, it sees what it chose of them."""
    i = tl.arange(0, Q)
    n = tl.arange(0, N)
    p = tl.arange(0, P)
    r = tl.arange(0, R)
    v = tl.arange(0, V)
    for start in tl.range(begin, end, N, num_stages=STAGES):
        left = count - start
        k_nope = load_tile(keys + start * NOPE, n, p, left, NOPE, P, ENDS)
        k_rope = load_tile(ropes + start * ROPE, n, r, left, ROPE, R, ENDS)
        value = load_tile(values + start * VALUE, n, v, left, VALUE, V, ENDS)
        s = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee") * scale
        if ENDS:
            key = start + n
            seen = (key[None, :] <= limit + i[:, None]) & (key < count)[None, :]
            s = tl.where(seen, s, float("-inf"))
        if bits is not None:
            s = tl.where(chosen(bits, start, N), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = new
        if bits is not None:  # -inf as long as nothing was chosen
            base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        norm = norm * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new
    return top, norm, acc


@kernel(do_not_specialize=["entries", "total", "state_first", "words"])
def attend(
    q_nope, q_rope, keys, ropes, values, tiles, bits, out, state, state_lse, scale, entries, heads,
    total, state_first, words, nope_row, nope_head, rope_row, rope_head,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program per tile of queries and head; HEADS heads at a time, so that what they read stays
    near. keys [heads, total, NOPE], values [heads, total, VALUE], ropes [total, ROPE], bits
    [tokens, words] as `set_bits` leaves them, or None: every query sees all before it."""
    pdl_wait()
    group, within = tl.program_id(0) // (entries * HEADS), tl.program_id(0) % (entries * HEADS)
    head = (group * HEADS + within % HEADS).to(tl.int64)
    tile = tiles + within // HEADS * FIELDS
    token, queries, position = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    key, first, count = tl.load(tile + 3).to(tl.int64), tl.load(tile + 4), tl.load(tile + 5)
    i, p, r, v = tl.arange(0, Q), tl.arange(0, P), tl.arange(0, R), tl.arange(0, V)
    real = (i < queries)[:, None]
    at = q_nope + token * nope_row + head * nope_head
    qn = tl.load(at + i[:, None] * nope_row + p[None, :], real & (p < NOPE)[None, :], 0.0)
    at = q_rope + token * rope_row + head * rope_head
    qr = tl.load(at + i[:, None] * rope_row + r[None, :], real & (r < ROPE)[None, :], 0.0)
    inside = real & (v < VALUE)[None, :]
    at_state = (token - state_first + i) * heads + head
    within_state = at_state[:, None] * VALUE + v[None, :]
    top = tl.full([Q], float("-inf"), tl.float32)
    norm = tl.zeros([Q], tl.float32)
    acc = tl.zeros([Q, V], tl.float32)
    if tl.load(tile + 6) != 0:  # keys before these were seen already
        top = tl.load(state_lse + at_state, i < queries, 0.0) / LN_2
        norm += 1.0
        acc = tl.load(state + within_state, inside, 0.0)
    at_key = keys + (head * total + key) * NOPE
    at_rope = ropes + key * ROPE
    at_value = values + (head * total + key) * VALUE
    at_bits = bits
    if bits is not None:
        mine = bits + (token + tl.minimum(i, queries - 1)) * words
        at_bits = mine + first // BITS
    limit = position - first
    every = tl.minimum(tl.maximum(limit + 1, 0), count) // N * N
    end = tl.minimum(limit + queries, count)
    top, norm, acc = fold_keys(
        qn, qr, at_key, at_rope, at_value, at_bits, 0, every, count, limit, scale, top, norm, acc,
        NOPE, ROPE, VALUE, P, R, V, Q, N, False, STAGES,
    )  # fmt: skip
    top, norm, acc = fold_keys(
        qn, qr, at_key, at_rope, at_value, at_bits, every, end, count, limit, scale, top, norm, acc,
        NOPE, ROPE, VALUE, P, R, V, Q, N, True, STAGES,
    )  # fmt: skip
    if bits is not None:  # zero where nothing was chosen, NaN where a choice was not to be had
        norm = tl.where(norm == 0.0, 1.0, norm)
        norm = tl.where(tl.load(mine + words - 1) == 0, norm, float("nan"))
    acc = acc / norm[:, None]
    if tl.load(tile + 7) != 0:  # no more keys
        to = ((token + i) * heads + head)[:, None] * VALUE + v[None, :]
        tl.store(out + to, acc.to(out.dtype.element_ty), inside)
    else:
        tl.store(state + within_state, acc, inside)
        tl.store(state_lse + at_state, (top + tl.log2(norm)) * LN_2, i < queries)
