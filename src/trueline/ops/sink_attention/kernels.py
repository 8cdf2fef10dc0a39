# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Two loops over keys, of the window and of entries, into one sum: n keys of a tile, m queries
(tokens times heads), d numbers of a row. Cells are looked up a tile before they are read."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold(q, keys, seen, scale, top, norm, acc):
    """Add a tile of keys, which are values too. Exponents are of two: `scale` has the factor."""
    s = tl.dot(q, tl.trans(keys), input_precision="ieee")
    s = tl.where(seen, s * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(top - base)
    acc = tl.dot(p.to(keys.dtype), keys, acc * shrink[:, None], input_precision="ieee")
    return new, norm * shrink + tl.sum(p, 1), acc


@triton.jit
def cells_at(table, number, there, SIZE: tl.constexpr):
    """Of positions or entries of one sequence."""
    block = tl.load(table + number // SIZE, mask=there, other=0).to(tl.int64)
    return block * SIZE + number % SIZE


@triton.jit
def entry_cells(table, list_, i, stop, SIZE: tl.constexpr):
    """Of the i-th entries, or of the i-th of a list."""
    number = i
    if list_ is not None:
        number = tl.load(list_ + i, mask=i < stop, other=0)
    return cells_at(table, number, i < stop, SIZE)


@triton.jit
def listed(list_, width, seen, CHUNK: tl.constexpr):
    """How many entries stand before the first -1; -1 if one of them is not seen."""
    end = width
    unseen = tl.zeros((), tl.int32)
    for start in range(0, width, CHUNK):
        i = start + tl.arange(0, CHUNK)
        number = tl.load(list_ + i, mask=i < width, other=-1)
        end = tl.minimum(end, tl.min(tl.where(number < 0, i, width), 0))
        unseen += tl.sum(((i < end) & (number >= seen)).to(tl.int32), 0)
    return tl.where(unseen > 0, -1, end)


@triton.jit
def leave(
    top, norm, acc, sinks, out, partial_out, partial_lse, row, h, d, real, split, splits, wrong,
    held, DIM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The result, or a split's part of it; one without keys, not `held`, has no part."""
    inside = real[:, None] & (d < DIM)[None, :]
    base = tl.where(top == float("-inf"), 0.0, top)
    if not SPLIT:
        sink = tl.load(sinks + h, mask=real, other=0.0) * LOG2_E
        base = tl.maximum(base, sink)
        share = tl.exp2(top - base)
        total = norm * share + tl.exp2(sink - base)
        made = acc * (share / tl.where(total == 0.0, 1.0, total))[:, None]
        made = tl.where(wrong, float("nan"), made)
        tl.store(out + row[:, None] * DIM + d[None, :], made.to(out.dtype.element_ty), mask=inside)
    else:
        row = row * splits + split
        made = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
        lse = tl.where(wrong, float("nan"), base + tl.log2(norm))
        tl.store(partial_out + row[:, None] * DIM + d[None, :], made, mask=inside & held)
        tl.store(partial_lse + row, lse, mask=real)


@kernel(do_not_specialize=["splits", "window_table", "entry_table", "width", "chosen_row"])
def attend(
    q, window, entries, window_blocks, entry_blocks, lengths, groups, runs, chosen, sinks, out,
    partial_out, partial_lse, scale, heads, splits, each, window_table, entry_table, width,
    chosen_row, q_row, q_head,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program per group of tokens of one run, tile of heads, and split of their keys: of several
    splits each leaves its part of the sum. One kernel for any number of them."""
    pdl_wait(False)  # what follows is to find all multiprocessors free
    token, count = tl.program_id(0).to(tl.int64), 1
    if groups is not None:
        token, count = tl.load(groups + 2 * token).to(tl.int64), tl.load(groups + 2 * token + 1)
    if runs is not None:
        run = tl.load(runs + token).to(tl.int64)
    else:
        run = token // each
    split = tl.program_id(2)
    m, n, d = tl.arange(0, TOKENS * HEADS), tl.arange(0, TILE), tl.arange(0, D)
    of, h = m // HEADS, tl.program_id(1) * HEADS + m % HEADS
    real = (of < count) & (h < heads)
    length = tl.load(lengths + token + of, mask=of < count, other=0).to(tl.int32)
    stop = tl.max(length, 0)
    first = tl.load(lengths + token).to(tl.int32)
    oldest = tl.maximum(first - WINDOW, 0)
    num_entries = tl.zeros((), tl.int32)
    if RATIO > 0:
        num_entries = stop // RATIO
        list_ = chosen
        if chosen is not None:
            list_ = chosen + token * chosen_row
            num_entries = listed(list_, width, num_entries, CHUNK)
    window_tiles = tl.cdiv(stop - oldest, TILE)
    tiles = window_tiles + tl.cdiv(tl.maximum(num_entries, 0), TILE)
    begin, end = 0, tiles
    if SPLIT:
        begin, end = tiles * split // splits, tiles * (split + 1) // splits

    at = q + (token + of)[:, None] * q_row + h[:, None] * q_head + d[None, :]
    query = tl.load(at, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    norm = tl.zeros([TOKENS * HEADS], tl.float32)
    acc = tl.zeros([TOKENS * HEADS, D], tl.float32)
    table = window_blocks + run * window_table
    position = oldest + begin * TILE + n
    cell = cells_at(table, position, position < stop, WINDOW_BLOCK)
    for _ in tl.range(begin, tl.minimum(end, window_tiles), num_stages=STAGES):
        there = (position < stop)[:, None] & (d < DIM)[None, :]
        keys = tl.load(window + cell[:, None] * DIM + d[None, :], mask=there, other=0.0)
        seen = position[None, :] < length[:, None]
        seen = seen & (position[None, :] >= length[:, None] - WINDOW)
        position += TILE
        cell = cells_at(table, position, position < stop, WINDOW_BLOCK)
        top, norm, acc = fold(query, keys, seen, scale, top, norm, acc)
    if RATIO > 0:
        table = entry_blocks + run * entry_table
        i = (tl.maximum(begin, window_tiles) - window_tiles) * TILE + n
        cell = entry_cells(table, list_, i, num_entries, ENTRY_BLOCK)
        for _ in tl.range(tl.maximum(begin, window_tiles), end, num_stages=STAGES):
            there = (i < num_entries)[:, None] & (d < DIM)[None, :]
            keys = tl.load(entries + cell[:, None] * DIM + d[None, :], mask=there, other=0.0)
            if chosen is None:
                seen = i[None, :] < (length // RATIO)[:, None]
            else:
                seen = (i < num_entries)[None, :] & (length > 0)[:, None]
            i += TILE
            cell = entry_cells(table, list_, i, num_entries, ENTRY_BLOCK)
            top, norm, acc = fold(query, keys, seen, scale, top, norm, acc)
    leave(
        top, norm, acc, sinks, out, partial_out, partial_lse, (token + of) * heads + h, h, d, real,
        split, splits, num_entries < 0, begin < end, DIM, SPLIT,
    )  # fmt: skip


@kernel(do_not_specialize=["splits"])
def merge(
    partial_out, partial_lse, sinks, out, heads, splits,
    DIM: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A program per token and head: the splits in their order, and the sink."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    s, d = tl.arange(0, MOST), tl.arange(0, D)
    z = tl.load(partial_lse + row * splits + s, mask=s < splits, other=float("-inf"))
    wrong = tl.sum((z != z).to(tl.int32), 0) > 0
    sink = tl.load(sinks + tl.program_id(1)) * LOG2_E
    top = tl.maximum(tl.max(z, 0), sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(z - base)
    total = tl.sum(share, 0) + tl.exp2(sink - base)
    held = (share > 0.0)[:, None] & (d < DIM)[None, :]
    at = partial_out + (row * splits + s)[:, None] * DIM + d[None, :]
    made = tl.sum(tl.load(at, mask=held, other=0.0) * share[:, None], 0)
    made = made / tl.where(total == 0.0, 1.0, total)
    made = tl.where(wrong, float("nan"), made)
    tl.store(out + row * DIM + d, made.to(out.dtype.element_ty), mask=d < DIM)
