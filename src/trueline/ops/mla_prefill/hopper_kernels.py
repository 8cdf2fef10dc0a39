# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`attend` on Hopper GPUs, in Gluon, for 16-bit dtypes. Warp specialisation: two consumer warp
groups have 64 of a program's queries each and go over the same keys, so that one group's MMAs
overlap the other one's exponents; four producer warps load keys and values ahead (ops/gluon.py).
The scores of a tile of keys are issued before the values of the tile before are waited for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
from trueline.ops.mla_prefill.cut import HOPPER_KEYS, HOPPER_QUERIES
from trueline.ops.mla_prefill.kernels import BITS, FIELDS

OWN = gl.constexpr(HOPPER_QUERIES // 2)
N = gl.constexpr(HOPPER_KEYS)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HOPPER_KEYS, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))


@gluon.jit
def tile_of(tiles, entry):
    """token, queries, limit, key, first, keys, resumes, finishes; query i sees keys to limit + i"""
    tile = tiles + entry * FIELDS
    first = gl.load(tile + 4)
    limit = gl.load(tile + 2) - first
    return (
        gl.load(tile).to(gl.int64), gl.load(tile + 1), limit, gl.load(tile + 3).to(gl.int64),
        first, gl.load(tile + 5), gl.load(tile + 6), gl.load(tile + 7),
    )  # fmt: skip


@gluon.jit
def scores(q_nope, q_rope, k_nope, k_rope, buffer, WHO: gl.constexpr):
    """Of the own queries; not waited for."""
    zero = unknown_zero()
    s = gl.zeros([OWN, N], gl.float32, SCORES)
    k = k_nope.index(buffer).permute((1, 0))
    s = warpgroup_mma(q_nope.index(WHO + zero), k, s, use_acc=False, is_async=True)
    k = k_rope.index(buffer).permute((1, 0))
    return warpgroup_mma(q_rope.index(WHO + zero), k, s, is_async=True)


@gluon.jit
def words_of(bits, start, CHOSEN: gl.constexpr):
    """Of each query, what it chose of N keys from `start` on: four words."""
    gl.static_assert(N // BITS == 4)
    at = bits + start // BITS
    if CHOSEN:
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    none = gl.zeros([OWN], gl.int32, ROWS)
    return none, none, none, none


@gluon.jit
def exponents(
    s, words, start, every, limit, count, scale, top, CHOSEN: gl.constexpr, WHO: gl.constexpr
):
    """-> exponents of two, the largest score so far, by how much older ones shrink"""
    n = gl.arange(0, N, gl.SliceLayout(0, SCORES))
    if start + N > every:
        i = WHO * OWN + gl.arange(0, OWN, ROWS)
        key = start + n
        seen = (key[None, :] <= limit + i[:, None]) & (key < count)[None, :]
        s = gl.where(seen, s, NOTHING)
    if CHOSEN:
        word = words[0][:, None]
        for more in gl.static_range(1, N // BITS):
            word = gl.where((n < more * BITS)[None, :], word, words[more][:, None])
        s = gl.where(((word >> (n % BITS)[None, :]) & 1) != 0, s, NOTHING)
    new = gl.maximum(top, gl.max(s, 1) * scale)
    base = gl.where(new == NOTHING, 0.0, new)  # as long as nothing was seen
    return gl.exp2(s * scale - base[:, None]), new, gl.exp2(top - base)


@gluon.jit
def add(p, value, acc, shrink, VALUES: gl.constexpr):
    """Values of a tile; not waited for."""
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, VALUES))
    p = gl.convert_layout(p.to(value.dtype), gl.DotOperandLayout(0, VALUES, 2))
    return warpgroup_mma(p, value, acc * shrink[:, None], is_async=True)


@gluon.jit
def fold(
    shared, barriers, bits, tiles, every, limit, count, scale, top, norm, acc,
    VALUES: gl.constexpr, CHOSEN: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The first `tiles` tiles of keys, at least one; all queries see every key before `every`."""
    q_nope, q_rope, k_nope, k_rope, values = shared
    k_full, v_full, k_empty, v_empty = barriers
    mbarrier.wait(k_full.index(0), 0)
    words = words_of(bits, 0, CHOSEN)
    s = warpgroup_mma_wait(0, deps=[scores(q_nope, q_rope, k_nope, k_rope, 0, WHO)])
    signal(k_empty.index(0))
    for tile in range(tiles - 1):
        p, top, shrink = exponents(
            s, words, tile * N, every, limit, count, scale, top, CHOSEN, WHO
        )  # fmt: skip
        norm = norm * shrink + gl.sum(p, 1)
        mbarrier.wait(v_full.index(tile & 1), (tile >> 1) & 1)
        acc = add(p, values.index(tile & 1), acc, shrink, VALUES)
        then = tile + 1
        mbarrier.wait(k_full.index(then & 1), (then >> 1) & 1)
        s = scores(q_nope, q_rope, k_nope, k_rope, then & 1, WHO)
        words = words_of(bits, then * N, CHOSEN)
        acc = warpgroup_mma_wait(2, deps=[acc])
        signal(v_empty.index(tile & 1))
        s = warpgroup_mma_wait(0, deps=[s])
        signal(k_empty.index(then & 1))
    last = tiles - 1
    p, top, shrink = exponents(s, words, last * N, every, limit, count, scale, top, CHOSEN, WHO)
    norm = norm * shrink + gl.sum(p, 1)
    mbarrier.wait(v_full.index(last & 1), (last >> 1) & 1)
    acc = warpgroup_mma_wait(0, deps=[add(p, values.index(last & 1), acc, shrink, VALUES)])
    signal(v_empty.index(last & 1))
    return top, norm, acc


@gluon.jit
def consume(
    shared, barriers, q_full, work, VALUE: gl.constexpr, CHOSEN: gl.constexpr, WHO: gl.constexpr
):  # fmt: skip
    tiles, entry, bits, to, scale, heads, head, state_first, words = work
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    out, state, state_lse = to
    k_full, v_full, k_empty, v_empty = barriers
    token, queries, limit, _, first, count, resumes, finishes = tile_of(tiles, entry)
    i = WHO * OWN + gl.arange(0, OWN, ROWS)
    j = WHO * OWN + gl.arange(0, OWN, gl.SliceLayout(1, VALUES))
    v = gl.arange(0, VALUE, gl.SliceLayout(0, VALUES))
    real = (j < queries)[:, None]
    in_state = (token - state_first + j) * heads + head
    in_state = in_state[:, None] * VALUE + v[None, :]
    of_lse = state_lse + (token - state_first + i) * heads + head
    top = gl.full([OWN], NOTHING, gl.float32, ROWS)
    norm = gl.zeros([OWN], gl.float32, ROWS)
    acc = gl.zeros([OWN, VALUE], gl.float32, VALUES)
    if resumes != 0:  # keys before these were seen already
        top = gl.load(of_lse, i < queries, 0.0) / LN_2
        norm += 1.0
        acc = gl.load(state + in_state, real, 0.0)
    mine = bits + (token + gl.minimum(i, queries - 1)) * words
    every = gl.minimum(gl.maximum(limit + WHO * OWN + 1, 0), count) // N * N
    end = gl.minimum(limit + gl.minimum(queries, (WHO + 1) * OWN), count)
    own = gl.where(queries > WHO * OWN, gl.cdiv(gl.maximum(end, 0), N), 0)
    mbarrier.wait(q_full.index(0), 0)
    if own > 0:
        top, norm, acc = fold(
            shared, barriers, mine + first // BITS, own, every, limit, count, scale, top, norm,
            acc, VALUES, CHOSEN, WHO,
        )  # fmt: skip
    for tile in range(own, gl.cdiv(gl.minimum(limit + queries, count), N)):  # the other's alone
        buffer, phase = tile & 1, (tile >> 1) & 1
        mbarrier.wait(k_full.index(buffer), phase)
        signal(k_empty.index(buffer))
        mbarrier.wait(v_full.index(buffer), phase)
        signal(v_empty.index(buffer))
    if CHOSEN:  # zero where nothing was chosen, NaN where a choice was not to be had
        norm = gl.where(norm == 0.0, 1.0, norm)
        norm = gl.where(gl.load(mine + words - 1) == 0, norm, float("nan"))
    acc = acc / gl.convert_layout(norm, gl.SliceLayout(1, VALUES))[:, None]
    if finishes != 0:
        at = ((token + j) * heads + head)[:, None] * VALUE + v[None, :]
        gl.store(out + at, acc.to(out.dtype.element_ty), real)
    else:
        gl.store(state + in_state, acc, real)
        gl.store(of_lse, (top + gl.log2(norm)) * LN_2, i < queries)


@gluon.jit
def produce(
    shared, barriers, q_full, tiles, entry, sources, strides, total, head,
    NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    q_nope, q_rope, k_nope, k_rope, values = shared
    k_full, v_full, k_empty, v_empty = barriers
    of_q_nope, of_q_rope, of_keys, of_ropes, of_values = sources
    nope_row, nope_head, rope_row, rope_head = strides
    token, queries, limit, key, _, count, _, _ = tile_of(tiles, entry)
    for who in gl.static_range(2):
        i = who * OWN + gl.arange(0, OWN, gl.SliceLayout(1, COPIED))
        at = of_q_nope + (token + i) * nope_row + head * nope_head
        copy_columns(q_nope.index(who), at, i < queries, 0, NOPE)
        at = of_q_rope + (token + i) * rope_row + head * rope_head
        copy_columns(q_rope.index(who), at, i < queries, 0, ROPE)
    signal_copied(q_full.index(0))
    n = gl.arange(0, N, gl.SliceLayout(1, COPIED))
    at_key = of_keys + (head * total + key) * NOPE
    at_rope = of_ropes + key * ROPE
    at_value = of_values + (head * total + key) * VALUE
    for tile in range(gl.cdiv(gl.minimum(limit + queries, count), N)):
        buffer, phase = tile & 1, ((tile >> 1) & 1) ^ 1
        place = tile * N + n
        mbarrier.wait(k_empty.index(buffer), phase)
        copy_columns(k_nope.index(buffer), at_key + place * NOPE, place < count, 0, NOPE)
        copy_columns(k_rope.index(buffer), at_rope + place * ROPE, place < count, 0, ROPE)
        signal_copied(k_full.index(buffer))
        mbarrier.wait(v_empty.index(buffer), phase)
        copy_columns(values.index(buffer), at_value + place * VALUE, place < count, 0, VALUE)
        signal_copied(v_full.index(buffer))


@kernel(do_not_specialize=["entries", "total", "state_first", "words"])
def attend_warp_specialised(
    of_q_nope, of_q_rope, of_keys, of_ropes, of_values, tiles, bits, out, state, state_lse, scale,
    entries, heads, total, state_first, words, nope_row, nope_head, rope_row, rope_head,
    NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr, HEADS: gl.constexpr,
    CHOSEN: gl.constexpr,
):  # fmt: skip
    """A program per tile of queries and head, as `kernels.attend`."""
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = of_q_nope.dtype.element_ty
    q_nope = gl.allocate_shared_memory(dtype, [2, OWN, NOPE], OPERAND)
    q_rope = gl.allocate_shared_memory(dtype, [2, OWN, ROPE], OPERAND)
    k_nope = gl.allocate_shared_memory(dtype, [2, N, NOPE], OPERAND)
    k_rope = gl.allocate_shared_memory(dtype, [2, N, ROPE], OPERAND)
    values = gl.allocate_shared_memory(dtype, [2, N, VALUE], OPERAND)
    shared = (q_nope, q_rope, k_nope, k_rope, values)
    full = (made_barriers(2, PRODUCER_THREADS), made_barriers(2, PRODUCER_THREADS))
    empty = (made_barriers(2, 2), made_barriers(2, 2))
    barriers = (full[0], full[1], empty[0], empty[1])
    q_full = made_barriers(1, PRODUCER_THREADS)
    fence_async_shared()
    group, within = gl.program_id(0) // (entries * HEADS), gl.program_id(0) % (entries * HEADS)
    head = (group * HEADS + within % HEADS).to(gl.int64)
    entry = within // HEADS
    sources = (of_q_nope, of_q_rope, of_keys, of_ropes, of_values)
    strides = (nope_row, nope_head, rope_row, rope_head)
    to = (out, state, state_lse)
    work = (tiles, entry, bits, to, scale, heads, head, state_first, words)
    gl.warp_specialize(
        [
            (
                produce,
                (
                    shared, barriers, q_full, tiles, entry, sources, strides, total, head, NOPE,
                    ROPE, VALUE,
                ),
            ),
            (consume, (shared, barriers, q_full, work, VALUE, CHOSEN, 0)),
            (consume, (shared, barriers, q_full, work, VALUE, CHOSEN, 1)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip
