# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""One loop over keys for decode, for lists of cells and for any dims: n keys of a tile, h heads,
l of the latent, r of the rotated part. Block numbers are loaded an iteration before the tile that
needs them, or the copies into shared memory would wait for them. Numbers that change from step to
step are not specialised: no step waits for a compiler."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import scaled

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def blocks_of(table, tile, n, length, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """One number where a tile lies within one block."""
    position = tile * TILE
    if BLOCK % TILE != 0:
        position = position + n
    return tl.load(table + position // BLOCK, mask=position < length, other=0)


@triton.jit
def cells_of(block, tile, n, TILE: tl.constexpr, BLOCK: tl.constexpr):
    return block.to(tl.int64) * BLOCK + (tile * TILE + n) % BLOCK


@triton.jit
def load_keys(
    rows, block, tile, n, length, column,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[n, columns] of the cache; zeros beyond the row's end, whichever rows own those blocks."""
    if BLOCK % TILE == 0:
        base = rows + (block.to(tl.int64) * BLOCK + tile * TILE % BLOCK) * WIDTH
        at = base + (n[:, None] * WIDTH + column[None, :])
    else:
        cell = cells_of(block, tile, n, TILE, BLOCK)
        at = (rows + cell * WIDTH)[:, None] + column[None, :]
    seen = (tile * TILE + n < length)[:, None]
    if MASKED:
        seen = seen & (column < LIMIT)[None, :]
    return tl.load(at, mask=seen, other=0.0)


@triton.jit
def fold(q_latent, q_rope, k_latent, k_rope, seen, scale, top, norm, acc):
    """Add a tile of keys. `norm` keeps a sum per place of a tile: they are added up at the end.
    Exponents are of two: `scale` has the factor in it."""
    s = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
    s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee")
    s = tl.where(seen[None, :], s * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(top - base)[:, None]
    acc = acc * shrink
    acc = tl.dot(p.to(k_latent.dtype), k_latent, acc, input_precision="ieee")
    return new, norm * shrink + p, acc


@triton.jit
def attend_split(
    q_latent, q_rope, rows, scales, keys, table, length, start, stop, scale,
    ROW: tl.constexpr, KEY_ROW: tl.constexpr, KEY_AT: tl.constexpr, SCALE_ROW: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles start..stop of a row -> out [h, l], sum of exponents in natural log [h]."""
    END: tl.constexpr = KEY_AT + ROPE
    n = tl.arange(0, TILE)
    l = tl.arange(0, L)  # noqa: E741
    r = KEY_AT + tl.arange(0, R)
    top = tl.full([H], float("-inf"), tl.float32)
    norm = tl.zeros([H, TILE], tl.float32)
    acc = tl.zeros([H, L], tl.float32)
    block = blocks_of(table, start, n, length, TILE, BLOCK)
    for tile in tl.range(start, stop, num_stages=STAGES):
        k_latent = load_keys(
            rows, block, tile, n, length, l, ROW, LATENT, LATENT != L, TILE, BLOCK
        )  # fmt: skip
        if scales is not None:
            cell = cells_of(block, tile, n, TILE, BLOCK)
            at = scales + cell * SCALE_ROW + SCALE_AT
            held = tile * TILE + n < length
            k_latent = scaled(k_latent, at, held, l, LATENT, GROUP, q_latent.dtype)
        k_rope = load_keys(keys, block, tile, n, length, r, KEY_ROW, END, ROPE != R, TILE, BLOCK)
        block = blocks_of(table, tile + 1, n, length, TILE, BLOCK)
        seen = tile * TILE + n < length
        top, norm, acc = fold(q_latent, q_rope, k_latent, k_rope, seen, scale, top, norm, acc)
    total = tl.sum(norm, 1)
    share = 1 / tl.where(total == 0.0, 1.0, total)
    return acc * share[:, None], (top + tl.log2(total)) * LN_2


@kernel(do_not_specialize=["table_row", "capacity", "partials"])
def attend(
    q, rows, table, lengths, entries, bounds, out, lse, partial_out, partial_lse, scale, heads,
    q_row, q_head, table_row, capacity, partials, scales, keys,
    ROW: tl.constexpr, KEY_ROW: tl.constexpr, KEY_AT: tl.constexpr, SCALE_ROW: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, H: tl.constexpr,
    HEAD_TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program per group and tile of heads. Whole rows are finished here; splits leave partial
    results. A length below zero says that the row's keys cannot be known: it becomes NaN."""
    pdl_wait(False)  # what follows is to find all multiprocessors free
    group = tl.program_id(0) // HEAD_TILES
    h = tl.program_id(0) % HEAD_TILES * H + tl.arange(0, H)
    l = tl.arange(0, L)  # noqa: E741
    r = tl.arange(0, R)
    real = (h < heads)[:, None]
    inside = l[None, :] < LATENT
    last = tl.minimum(tl.load(bounds + group + 1), capacity)
    for entry in tl.range(tl.load(bounds + group), last, num_stages=1):
        row = tl.load(entries + 4 * entry).to(tl.int64)
        start = tl.load(entries + 4 * entry + 1)
        length = tl.load(lengths + row)
        stop = tl.minimum(tl.load(entries + 4 * entry + 2), tl.cdiv(length, TILE))
        partial = tl.load(entries + 4 * entry + 3)
        at = q + row * q_row + h[:, None] * q_head
        q_latent = tl.load(at + l[None, :], mask=real & inside, other=0.0)
        q_rope = tl.load(at + LATENT + r[None, :], mask=real & (r[None, :] < ROPE), other=0.0)
        o, z = attend_split(
            q_latent, q_rope, rows, scales, keys, table + row * table_row, length, start, stop,
            scale, ROW, KEY_ROW, KEY_AT, SCALE_ROW, SCALE_AT, GROUP,
            LATENT, ROPE, L, R, H, TILE, BLOCK, STAGES,
        )  # fmt: skip
        o = tl.where(length < 0, float("nan"), o)
        z = tl.where(length < 0, float("nan"), z)
        if partial < 0:
            to = (row * heads + h) * LATENT
            tl.store(out + to[:, None] + l[None, :], o.to(out.dtype.element_ty), real & inside)
            tl.store(lse + row * heads + h, z, h < heads)
        elif partial < partials:
            at_partial = partial.to(tl.int64) * (HEAD_TILES * H) + h
            tl.store(partial_out + at_partial[:, None] * LATENT + l[None, :], o, inside)
            tl.store(partial_lse + at_partial, z)


@kernel(do_not_specialize=["rows", "capacity", "partials"])
def merge(
    partial_out, partial_lse, table, out, lse, rows, heads, covered, capacity, partials,
    LATENT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program per row, head and columns: the splits of a row in their order. A row without keys
    gets zeros, and what the list or the partials have no room for gets NaN: no row is forgotten."""
    pdl_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first, count = tl.load(table + rows + row), tl.load(table + 2 * rows + row)
    unmerged = tl.where(count > 1, count, 0)
    held = (tl.load(table + row) <= capacity) & (first + unmerged <= partials) & (head < covered)
    if (count != 1) | (held == 0):
        every = tl.arange(0, SPLITS)
        known = (every < count) & held
        z = tl.load(partial_lse + (first + every) * covered + head, mask=known, other=float("-inf"))
        top = tl.max(z, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(z - base), 0)
        acc = tl.zeros([COLUMNS], tl.float32)
        for i in range(0, count, AT_ONCE):
            split = i + tl.arange(0, AT_ONCE)
            mask = (split < count) & held
            at = (first + split).to(tl.int64) * covered + head
            share = tl.exp(tl.load(partial_lse + at, mask=mask, other=float("-inf")) - base)
            o = tl.load(
                partial_out + at[:, None] * LATENT + column[None, :],
                mask=mask[:, None] & (column < LATENT)[None, :],
                other=0.0,
            )
            acc += tl.sum(share[:, None] * o, 0)
        acc = tl.where(held, acc / tl.where(total == 0.0, 1.0, total), float("nan"))
        to = (row * heads + head) * LATENT + column
        tl.store(out + to, acc.to(out.dtype.element_ty), mask=column < LATENT)
        if tl.program_id(2) == 0:
            whole = tl.where(held, base + tl.log(total), float("nan"))
            tl.store(lse + row * heads + head, whole)
