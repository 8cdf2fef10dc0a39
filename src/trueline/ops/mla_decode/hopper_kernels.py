# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`attend` for 64 heads at a time on Hopper GPUs, in Gluon, for 16-bit dtypes. Half of a latent is
as wide as one MMA can be, the rotated part as wide as a tile is long (launch_plan.py).

Warp specialisation: two consumer warp groups share a program's heads, four producer warps load.
The consumers own tiles of keys alternately: the owner computes a tile's scores and exponents and
leaves the exponents in shared memory, where the tile's rotated part was; each consumer then
multiplies them with the tile's values in its own half of the latent's columns. So nothing is
multiplied twice (Triton's own layout has eight warps compute the same scores twice). The producers
load keys ahead into the buffer of each tile's owner: a half of the columns as soon as its consumer
is done with the tile before. No consumer waits for new keys while it holds old ones.

They synchronise with barriers in shared memory. A barrier completes once a tile of its buffer, or
once an entry of the split-KV schedule; tiles are counted through all entries, so that a tile's
count gives the barrier's phase.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from trueline.ops.gluon import (
    CONSUMER_REGISTERS,
    COPIED,
    LN_2,
    NOTHING,
    OPERAND,
    PRODUCER_THREADS,
    copy_columns,
    kernel,
    made_barriers,
    signal,
    signal_copied,
    unknown_zero,
)
from trueline.ops.mla_decode.launch_plan import HOPPER_TILE, MMA_COLUMNS

H = gl.constexpr(HOPPER_TILE)
TILE = gl.constexpr(HOPPER_TILE)
HALF = gl.constexpr(MMA_COLUMNS)
LATENT = gl.constexpr(2 * MMA_COLUMNS)
ROPE = gl.constexpr(HOPPER_TILE)
WIDTH = gl.constexpr(2 * MMA_COLUMNS + HOPPER_TILE)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def entry_of(entries, entry, lengths):
    """row, first tile, how many, partial, length"""
    row = gl.load(entries + 4 * entry).to(gl.int64)
    start = gl.load(entries + 4 * entry + 1)
    length = gl.load(lengths + row)
    stop = gl.minimum(gl.load(entries + 4 * entry + 2), gl.cdiv(length, TILE))
    return row, start, gl.maximum(stop - start, 0), gl.load(entries + 4 * entry + 3), length


@gluon.jit
def scores(q_latent, q_rope, k_latent, k_rope, full, phase, WHO: gl.constexpr):
    """Of the own tile; each half of its columns is waited for separately."""
    zero = unknown_zero()
    mbarrier.wait(full.index(2 * WHO), phase)
    k = k_latent.index(2 * WHO + zero).permute((1, 0))
    s = gl.zeros([H, TILE], gl.float32, SCORES)
    s = warpgroup_mma(q_latent.index(zero), k, s, use_acc=False, is_async=True)
    mbarrier.wait(full.index(2 * WHO + 1), phase)
    k = k_latent.index(2 * WHO + 1 + zero).permute((1, 0))
    s = warpgroup_mma(q_latent.index(zero + 1), k, s, is_async=True)
    k = k_rope.index(WHO + zero).permute((1, 0))
    s = warpgroup_mma(q_rope.index(zero), k, s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def publish(s, left, top, scale, k_rope, tops, shrinks, ready, WHO: gl.constexpr):
    """Exponents of the own tile, for both consumers -> their sums. Of base two: `scale` has
    the factor in it."""
    n = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    s = gl.where((n < left)[None, :], s * scale, NOTHING)
    new = gl.maximum(top, gl.max(s, 1))
    p = gl.exp2(s - new[:, None])
    k_rope.index(WHO).store(p.to(k_rope.dtype))
    tops.index(WHO).store(new)
    shrinks.index(WHO).store(gl.exp2(top - new))
    fence_async_shared()
    signal(ready.index(WHO))
    return gl.sum(p, 1)


@gluon.jit
def fold(shared, barriers, scale, begin, count, left, WHO: gl.constexpr):
    """Tiles begin .. begin + count, counted through all entries; `left`: keys from the first on.
    -> out [h, own half], the own tiles' sum of exponents [h]"""
    q_latent, q_rope, k_latent, k_rope, tops, shrinks, _ = shared
    full, empty, ready = barriers
    acc = gl.zeros([H, HALF], gl.float32, VALUES)
    total = gl.zeros([H], gl.float32, gl.SliceLayout(1, SCORES))
    for i in range(count):
        owner, phase = (begin + i) & 1, ((begin + i) >> 1) & 1
        more = gl.zeros([H], gl.float32, gl.SliceLayout(1, SCORES))
        if owner == WHO:
            s = scores(q_latent, q_rope, k_latent, k_rope, full, phase, WHO)
            top = gl.where(i > 0, tops.index(1 - WHO).load(gl.SliceLayout(1, SCORES)), NOTHING)
            more = publish(s, left - i * TILE, top, scale, k_rope, tops, shrinks, ready, WHO)
        else:
            mbarrier.wait(ready.index(1 - WHO), phase)
        total = total * shrinks.index(owner).load(gl.SliceLayout(1, SCORES)) + more
        acc = acc * shrinks.index(owner).load(gl.SliceLayout(1, VALUES))[:, None]
        zero = unknown_zero()
        p, v = k_rope.index(owner + zero), k_latent.index(2 * owner + WHO + zero)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v, acc, is_async=True)])
        signal(empty.index(2 * owner + WHO))
    return acc, total


@gluon.jit
def finish(acc, total, top, row, partial, length, to, WHO: gl.constexpr):
    """Writes a row that is not split; a split leaves partial results. A length below zero
    says that the row's keys cannot be known: it becomes NaN."""
    out, lse, partial_out, partial_lse, _, heads, head, partials, HEAD_TILES = to
    h = head + gl.arange(0, H, gl.SliceLayout(1, VALUES))
    column = WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, VALUES))
    acc = acc * (1 / gl.where(total == 0.0, 1.0, total))[:, None]
    z = (top + gl.log2(total)) * LN_2
    acc = gl.where(length < 0, float("nan"), acc)
    z = gl.where(length < 0, float("nan"), z)
    if partial < 0:
        at = out + ((row * heads + h) * LATENT)[:, None] + column[None, :]
        gl.store(at, acc.to(out.dtype.element_ty), mask=(h < heads)[:, None])
        if WHO == 0:
            gl.store(lse + row * heads + h, z, mask=h < heads)
    elif partial < partials:
        place = partial.to(gl.int64) * (HEAD_TILES * H) + h
        gl.store(partial_out + place[:, None] * LATENT + column[None, :], acc)
        if WHO == 0:
            gl.store(partial_lse + place, z)


@gluon.jit
def consume(shared, barriers, per_entry, work, to, WHO: gl.constexpr):
    tops, sums = shared[4], shared[6]
    q_full, q_empty, summed = per_entry[0].index(0), per_entry[1].index(0), per_entry[2].index(0)
    entries, lengths, first, last = work
    begin = 0
    for entry in range(first, last):
        row, start, count, partial, length = entry_of(entries, entry, lengths)
        phase = (entry - first) & 1
        mbarrier.wait(q_full, phase)
        acc, total = fold(shared, barriers, to[4], begin, count, length - start * TILE, WHO)
        begin += count
        sums.index(WHO).store(total)
        signal(summed)
        mbarrier.wait(summed, phase)
        both = sums.index(0).load(gl.SliceLayout(1, VALUES))
        both += sums.index(1).load(gl.SliceLayout(1, VALUES))
        top = tops.index((begin - 1) & 1).load(gl.SliceLayout(1, VALUES))
        top = gl.where(count > 0, top, NOTHING)
        signal(q_empty)
        finish(acc, both, top, row, partial, length, to, WHO)


@gluon.jit
def cells_of(table, tile, length, BLOCK: gl.constexpr):
    position = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, COPIED))
    block = gl.load(table + position // BLOCK, mask=position < length, other=0)
    return block.to(gl.int64) * BLOCK + position % BLOCK


@gluon.jit
def copy_tile(k_latent, k_rope, full, empty, at, seen, phase, WHOSE: gl.constexpr):
    """Each half as soon as its consumer has released the buffer; the rotated part after both."""
    mbarrier.wait(empty.index(2 * WHOSE), phase)
    copy_columns(k_latent.index(2 * WHOSE), at, seen, 0, HALF)
    signal_copied(full.index(2 * WHOSE))
    mbarrier.wait(empty.index(2 * WHOSE + 1), phase)
    copy_columns(k_latent.index(2 * WHOSE + 1), at, seen, HALF, HALF)
    copy_columns(k_rope.index(WHOSE), at, seen, LATENT, ROPE)
    signal_copied(full.index(2 * WHOSE + 1))


@gluon.jit
def produce(
    shared, barriers, per_entry, work, q, rows, table, heads, head, q_row, q_head, table_row,
    BLOCK: gl.constexpr,
):  # fmt: skip
    q_latent, q_rope, k_latent, k_rope = shared[0], shared[1], shared[2], shared[3]
    entries, lengths, first, last = work
    full, empty = barriers[0], barriers[1]
    q_full, q_empty = per_entry[0].index(0), per_entry[1].index(0)
    n = gl.arange(0, TILE, gl.SliceLayout(1, COPIED))
    h = head + gl.arange(0, H, gl.SliceLayout(1, COPIED))
    tile = 0
    for entry in range(first, last):
        row, start, count, _, length = entry_of(entries, entry, lengths)
        own = table + row * table_row
        at = rows + cells_of(own, start, length, BLOCK) * WIDTH
        mbarrier.wait(q_empty, ((entry - first) & 1) ^ 1)
        from_q, real = q + row * q_row + h * q_head, h < heads
        copy_columns(q_latent.index(0), from_q, real, 0, HALF)
        copy_columns(q_latent.index(1), from_q, real, HALF, HALF)
        copy_columns(q_rope.index(0), from_q, real, LATENT, ROPE)
        signal_copied(q_full)
        for i in range(start, start + count):
            seen = i * TILE + n < length
            then = rows + cells_of(own, i + 1, length, BLOCK) * WIDTH
            phase = ((tile >> 1) & 1) ^ 1
            if tile & 1 == 0:
                copy_tile(k_latent, k_rope, full, empty, at, seen, phase, 0)
            else:
                copy_tile(k_latent, k_rope, full, empty, at, seen, phase, 1)
            at = then
            tile += 1


@kernel(do_not_specialize=["table_row", "capacity", "partials"])
def attend_warp_specialised(
    q, rows, table, lengths, entries, bounds, out, lse, partial_out, partial_lse, scale, heads,
    q_row, q_head, table_row, capacity, partials, HEAD_TILES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """A program per group and tile of heads, as `kernels.attend`."""
    gdc_wait()
    dtype: gl.constexpr = q.dtype.element_ty
    q_latent = gl.allocate_shared_memory(dtype, [2, H, HALF], OPERAND)
    q_rope = gl.allocate_shared_memory(dtype, [1, H, ROPE], OPERAND)
    k_latent = gl.allocate_shared_memory(dtype, [4, TILE, HALF], OPERAND)
    k_rope = gl.allocate_shared_memory(dtype, [2, TILE, ROPE], OPERAND)
    tops = gl.allocate_shared_memory(gl.float32, [2, H], PLAIN)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, H], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, H], PLAIN)
    barriers = (made_barriers(4, PRODUCER_THREADS), made_barriers(4, 1), made_barriers(2, 1))
    per_entry = made_barriers(1, PRODUCER_THREADS), made_barriers(1, 2), made_barriers(1, 2)
    fence_async_shared()
    group = gl.program_id(0) // HEAD_TILES
    head = gl.program_id(0) % HEAD_TILES * H
    first = gl.load(bounds + group)
    last = gl.minimum(gl.load(bounds + group + 1), capacity)
    shared = (q_latent, q_rope, k_latent, k_rope, tops, shrinks, sums)
    work = (entries, lengths, first, last)
    to = (out, lse, partial_out, partial_lse, scale, heads, head, partials, HEAD_TILES)
    gl.warp_specialize(
        [
            (
                produce,
                (
                    shared, barriers, per_entry, work, q, rows, table, heads, head, q_row, q_head,
                    table_row, BLOCK,
                ),
            ),
            (consume, (shared, barriers, per_entry, work, to, 0)),
            (consume, (shared, barriers, per_entry, work, to, 1)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip
