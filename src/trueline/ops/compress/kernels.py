# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A program per token writes its tail, and makes the entry that the token completes. Of positions
of its own step it reads what it was given: other programs are writing their tails meanwhile."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.index_scores.kernels import channel_places, key_places
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import inverse_rms, rotated


@triton.jit
def pooled(
    u, z, tails, ape, table, token, length, start, u_row, z_row, channel, within,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The entry of the window that ends before `length`, at these channels."""
    SLOTS: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    top = tl.full(channel.shape, float("-inf"), tl.float32)
    norm = tl.zeros(channel.shape, tl.float32)
    acc = tl.zeros(channel.shape, tl.float32)
    for first in range(0, SLOTS, TILE):
        slot = first + tl.arange(0, TILE)
        position = length - SLOTS + slot
        counts = (slot < SLOTS) & (position >= 0)
        column = channel[None, :]
        if OVERLAP:
            column = column + tl.where(slot < RATIO, 0, DIM)[:, None]
        fresh = (counts & (position >= start))[:, None] & within[None, :]
        given = (token + position - (length - 1))[:, None]
        bias = tl.load(ape + (position % RATIO)[:, None] * WIDTH + column, mask=fresh, other=0.0)
        new_u = tl.load(u + given * u_row + column, mask=fresh, other=0.0).to(tl.float32)
        new_z = tl.load(z + given * z_row + column, mask=fresh, other=0.0).to(tl.float32)
        kept = counts & (position < start)
        block = tl.load(table + position // SIZE, mask=kept, other=0).to(tl.int64)
        at = tails + ((block * SIZE + position % SIZE) * (2 * WIDTH))[:, None] + column
        old = kept[:, None] & within[None, :]
        value = new_u + tl.load(at, mask=old, other=0.0)
        score = new_z + bias.to(tl.float32) + tl.load(at + WIDTH, mask=old, other=0.0)
        score = tl.where(counts[:, None], score, float("-inf"))
        # the window's own slots come last: a tile before them may have nothing that counts
        new = tl.maximum(top, tl.max(score, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp(score - base[None, :])
        shrink = tl.exp(top - base)
        norm = norm * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight * value, 0)
        top = new
    return acc / norm


@kernel(do_not_specialize=["table_row"])
def compress(
    u, z, tails, cells, table, lengths, starts, runs, places, ape, norm, cos, sin, out, eps, each,
    u_row, z_row, table_row, cos_row, sin_row, at,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, KEPT_BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, STEP: tl.constexpr, SHIFT: tl.constexpr,
    TILE: tl.constexpr, KIND: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    TOKEN: tl.constexpr, KEY: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """`places`: each token's row of the output, -1 for none; without it, its own. `at`: cells of
    these rows in a cache of entries; that of keys has a KIND, and sizes."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + token).to(tl.int32)
    if length == 0:
        return
    i = tl.arange(0, WHOLE)
    bias = tl.load(ape + (length - 1) % RATIO * WIDTH + i, mask=i < WIDTH, other=0.0)
    value = tl.load(u + token * u_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    score = tl.load(z + token * z_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    to = tails + tl.load(cells + token).to(tl.int64) * (2 * WIDTH) + i
    tl.store(to, value, mask=i < WIDTH)
    tl.store(to + WIDTH, score + bias.to(tl.float32), mask=i < WIDTH)
    if length % RATIO != 0:
        return
    if runs is None:
        run, row = token // each, token
        start = tl.load(lengths + run * each).to(tl.int32) - 1
    else:
        run, row = tl.load(runs + token).to(tl.int64), tl.load(places + token).to(tl.int64)
        start = tl.load(starts + token).to(tl.int32)
    mine = table + run * table_row
    c = tl.arange(0, KEPT_BLOCK)
    c_at = c
    j = tl.arange(0, HALF_BLOCK)
    a_at = KEPT + j * STEP
    b_at = a_at + SHIFT
    x = pooled(
        u, z, tails, ape, mine, token, length, start, u_row, z_row, c, c < KEPT,
        RATIO, OVERLAP, DIM, WIDTH, SIZE, TILE,
    )  # fmt: skip
    a = pooled(
        u, z, tails, ape, mine, token, length, start, u_row, z_row, a_at, j < HALF,
        RATIO, OVERLAP, DIM, WIDTH, SIZE, TILE,
    )  # fmt: skip
    b = pooled(
        u, z, tails, ape, mine, token, length, start, u_row, z_row, b_at, j < HALF,
        RATIO, OVERLAP, DIM, WIDTH, SIZE, TILE,
    )  # fmt: skip
    unit = inverse_rms(tl.sum(x * x, 0) + tl.sum(a * a, 0) + tl.sum(b * b, 0), eps, DIM)
    weight = tl.load(norm + c, mask=c < KEPT, other=0.0).to(tl.float32)
    a = a * unit * tl.load(norm + a_at, mask=j < HALF, other=0.0).to(tl.float32)
    b = b * unit * tl.load(norm + b_at, mask=j < HALF, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * cos_row + j, mask=j < HALF, other=0.0)
    sine = tl.load(sin + row * sin_row + j, mask=j < HALF, other=0.0)
    a, b = rotated(a, b, cosine, sine)
    if at is not None:
        row = tl.load(at + row).to(tl.int64)
    into = out
    if KIND is None:
        into += row * DIM
    else:
        into += key_places(row // ENTRIES, row % ENTRIES, KIND, BLOCK, TOKEN, KEY, ITEM)
        c_at = channel_places(c, KIND, ITEM)
        a_at = channel_places(a_at, KIND, ITEM)
        b_at = channel_places(b_at, KIND, ITEM)
    dtype = norm.dtype.element_ty
    tl.store(into + c_at, (x * unit * weight).to(dtype).to(out.dtype.element_ty), mask=c < KEPT)
    tl.store(into + a_at, a.to(dtype).to(out.dtype.element_ty), mask=j < HALF)
    tl.store(into + b_at, b.to(dtype).to(out.dtype.element_ty), mask=j < HALF)
