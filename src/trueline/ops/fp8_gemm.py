# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""fp8 × fp8 GEMM with block scales on Hopper GPUs, in Gluon: dense, and grouped by expert.

Persistent and warp specialised: a producer loads tiles by TMA, two consumer warp groups have 64
rows each of a tile of 128 × 256. The tensor cores sum 128 products; their sums are scaled and added
in float32 while the other warp group's are computed. The columns of a tile are two halves of one
block each: neighbours, or the gate's and the up projection's, which end in silu(gate) × up,
quantised for the next GEMM. Where that makes too few tiles for all multiprocessors, they have one
half."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trueline.ops.fp8 import LARGEST, SMALLEST
from trueline.ops.gluon import kernel, made_barriers, signal, swiglu

BLOCK = gl.constexpr(128)
"""Rows of a tile, and numbers that share a scale, along each side."""
OWN = gl.constexpr(64)
FEW = gl.constexpr(16)
"""Rows of an expert that are written together: most have few."""
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
CONSUMER_REGISTERS = gl.constexpr(232)


@gluon.jit
def tile_at(at, columns, GROUP: gl.constexpr):
    """Row and column tile: GROUP row tiles go over the columns together, so that what they read is
    still in the cache for the others."""
    step = columns * GROUP
    return at // step * GROUP + at % GROUP, at % step // GROUP


@gluon.jit
def expert_of(experts, m, GROUPED: gl.constexpr):
    expert = 0
    if GROUPED:
        expert = gl.load(experts + m)
    return expert


@gluon.jit
def is_live(order, row, pairs, GROUPED: gl.constexpr):
    """Whether there is such a row. An expert's tile has its pairs first, then none."""
    if GROUPED:
        row = gl.load(order + row)
    return row < pairs


@gluon.jit
def has_second(order, m, pairs, GROUPED: gl.constexpr):
    """Whether the second half of a tile's rows is loaded: a dense tile's always is."""
    second = pairs >= 0
    if GROUPED:
        second = is_live(order, m * BLOCK + OWN, pairs, GROUPED)
    return second


@gluon.jit
def load_weights(
    b, in_b, full, stage, expert, n, k, second, width, GATED: gl.constexpr, HALVES: gl.constexpr
):
    """Of a step; its barrier also waits for 64 rows of a, and 64 more if those are there."""
    bar = full.index(stage)
    mbarrier.expect(bar, (OWN + HALVES * BLOCK) * BLOCK, second == 0)
    mbarrier.expect(bar, (BLOCK + HALVES * BLOCK) * BLOCK, second)
    if GATED:
        left = expert * 2 * width + n * BLOCK
        right = left + width
    else:
        left = expert * width + n * HALVES * BLOCK
        right = left + BLOCK
    at = HALVES * stage
    tma.async_copy_global_to_shared(b, [left, k * BLOCK], bar, in_b.index(at))
    if HALVES == 2:
        tma.async_copy_global_to_shared(b, [right, k * BLOCK], bar, in_b.index(at + 1))


@gluon.jit
def load_rows(a, into, bar, row, k, second, GROUPED: gl.constexpr):
    if GROUPED:
        low, high = into.slice(0, OWN, dim=0), into.slice(OWN, OWN, dim=0)
        tma.async_copy_global_to_shared(a, [row, k * BLOCK], bar, low)
        tma.async_copy_global_to_shared(a, [row + OWN, k * BLOCK], bar, high, pred=second)
    else:
        tma.async_copy_global_to_shared(a, [row, k * BLOCK], bar, into)


@gluon.jit
def produce(
    a, b, shared, barriers, experts, order, pairs, work, depth, width,
    GATED: gl.constexpr, GROUPED: gl.constexpr, GROUP: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    in_a, in_b, _ = shared
    full, empty = barriers
    row_tiles, columns, tiles = work
    # weights are there before the rows are
    m, n = tile_at(gl.program_id(0), columns, GROUP)
    ahead = 0
    if m < row_tiles:
        expert = expert_of(experts, m, GROUPED)
        second = has_second(order, m, pairs, GROUPED)
        for early in gl.static_range(STAGES):
            if early * BLOCK < depth:
                load_weights(b, in_b, full, early, expert, n, early, second, width, GATED, HALVES)
                ahead += 1
    gdc_wait()
    gdc_launch_dependents()
    loaded = 0
    for at in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = tile_at(at, columns, GROUP)
        if m < row_tiles:
            expert = expert_of(experts, m, GROUPED)
            second = has_second(order, m, pairs, GROUPED)
            for k in range(gl.cdiv(depth, BLOCK)):
                stage = loaded % STAGES
                mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
                if loaded >= ahead:
                    load_weights(b, in_b, full, stage, expert, n, k, second, width, GATED, HALVES)
                load_rows(a, in_a.index(stage), full.index(stage), m * BLOCK, k, second, GROUPED)
                loaded += 1


@gluon.jit
def half(a, b):
    """[64, 128] sums over 128 products."""
    part = warpgroup_mma(
        a,
        b.permute((1, 0)),
        gl.zeros([OWN, BLOCK], gl.float32, SUMS),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def quantised(gate, up, scales, LIMIT: gl.constexpr, POWERS: gl.constexpr):
    """Codes of silu(gate) × up, not yet rounded; their scales are stored."""
    y = swiglu(gate, up, LIMIT)
    scale = gl.maximum(gl.max(gl.abs(y), 1), SMALLEST) / LARGEST
    if POWERS:  # the next power of two
        bits = scale.to(gl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    gl.store(scales, scale)
    return y / scale[:, None]


@gluon.jit
def write(out, staged, value, rows, column, GROUPED: gl.constexpr):
    """The rows that there are, once the tile before has been written."""
    order, pairs, row = rows
    tma.store_wait(0)
    gl.thread_barrier()
    staged.store(value.to(staged.dtype))
    fence_async_shared()
    gl.thread_barrier()
    if GROUPED:
        for at in gl.static_range(0, OWN, FEW):
            if is_live(order, row + at, pairs, GROUPED):
                some = staged.slice(at, FEW, dim=0)
                tma.async_copy_shared_to_global(out, [row + at, column], some)
    else:
        tma.async_copy_shared_to_global(out, [row, column], staged)


@gluon.jit
def scales_at(a, a_row, left, right, step):
    return gl.load(a + step * a_row), gl.load(left + step), gl.load(right + step)


@gluon.jit
def consume(
    shared, barriers, scales, experts, order, pairs, out, work, depth, width,
    GATED: gl.constexpr, LIMIT: gl.constexpr, POWERS: gl.constexpr, GROUPED: gl.constexpr,
    GROUP: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    in_a, in_b, in_out = shared
    full, empty = barriers
    of_a, a_row, of_b, of_out, out_row = scales
    row_tiles, columns, tiles = work
    steps, blocks = gl.cdiv(depth, BLOCK), gl.cdiv(width, BLOCK)
    staged = in_out.index(WHO)
    gdc_wait()
    own = WHO * OWN + gl.arange(0, OWN, gl.SliceLayout(1, SUMS))
    used = 0
    for at in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = tile_at(at, columns, GROUP)
        if m < row_tiles:
            expert = expert_of(experts, m, GROUPED)
            if GATED:
                b_left = of_b + (expert * 2 * blocks + n) * steps
                b_right = b_left + blocks * steps
            else:
                b_left = of_b + (expert * blocks + HALVES * n) * steps
                b_right = b_left + gl.where(HALVES * n + 1 < blocks, steps, 0)
            at_row = m * BLOCK + WHO * OWN
            live = is_live(order, at_row, pairs, GROUPED)
            a_at = of_a + m * BLOCK + own
            left = gl.zeros([OWN, BLOCK], gl.float32, SUMS)
            right = gl.zeros([OWN, BLOCK], gl.float32, SUMS)
            # two steps ahead: they take longer to come than a step takes
            row, first, second = scales_at(a_at, a_row, b_left, b_right, 0)
            then = gl.minimum(1, steps - 1)
            next_row, next_first, next_second = scales_at(a_at, a_row, b_left, b_right, then)
            for k in range(steps):
                to_left, to_right = row * first, row * second
                row, first, second = next_row, next_first, next_second
                then = gl.minimum(k + 2, steps - 1)
                next_row, next_first, next_second = scales_at(a_at, a_row, b_left, b_right, then)
                stage = used % STAGES
                mbarrier.wait(full.index(stage), (used // STAGES) & 1)
                if live:
                    a, b = in_a.index(stage).slice(WHO * OWN, OWN, dim=0), HALVES * stage
                    part = half(a, in_b.index(b))
                    if HALVES == 2:
                        left += part * to_left[:, None]
                        part = half(a, in_b.index(b + 1))
                        signal(empty.index(stage))
                        right += part * to_right[:, None]
                    else:
                        signal(empty.index(stage))
                        left += part * to_left[:, None]
                else:
                    signal(empty.index(stage))
                used += 1
            if live:
                rows = (order, pairs, at_row)
                if GATED:
                    to = of_out + n * out_row + m * BLOCK + own
                    y = quantised(left, right, to, LIMIT, POWERS)
                    write(out, staged, y, rows, n * BLOCK, GROUPED)
                else:
                    column = n * HALVES * BLOCK
                    write(out, staged, left, rows, column, GROUPED)
                    if HALVES == 2:
                        write(out, staged, right, rows, column + BLOCK, GROUPED)
    tma.store_wait(0)


@kernel(do_not_specialize=["a_row", "out_row", "pairs"])
def gemm(
    a, b, of_a, a_row, of_b, experts, order, pairs, total, out, of_out, out_row, depth, width,
    GATED: gl.constexpr, LIMIT: gl.constexpr, POWERS: gl.constexpr, GROUPED: gl.constexpr,
    GROUP: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [rows, width] = a [rows, depth] × bᵀ, b [experts × width, depth]. Scales of a are
    [depth / 128, a_row], those of b [experts × width / 128, depth / 128], rounded up.

    The kernel before wrote no weights, and, of what is GROUPED, not `experts`, `order`, `total`.
    GROUPED: row tile m takes b of experts[m]; order has the pairs of the rows, none from `pairs`
    on, and those first in their tile; total[0] is the number of row tiles. Otherwise there is one
    expert, and `pairs` rows. GATED: b [experts × 2 width, depth] has the gate's rows and then those
    of the up projection; out is fp8 of silu(gate) × up, clamped to a LIMIT; its scales
    [width / 128, out_row], powers of two if POWERS."""
    in_a = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK, BLOCK], a.layout)
    in_b = gl.allocate_shared_memory(b.dtype, [HALVES * STAGES, BLOCK, BLOCK], b.layout)
    in_out = gl.allocate_shared_memory(out.dtype, [2, OWN, BLOCK], out.layout)
    barriers = (made_barriers(STAGES, 1), made_barriers(STAGES, 2))
    fence_async_shared()
    columns = gl.cdiv(width, BLOCK if GATED else HALVES * BLOCK)
    if GROUPED:
        row_tiles = gl.load(total)
    else:
        row_tiles = gl.cdiv(pairs, BLOCK)
    work = (row_tiles, columns, gl.cdiv(row_tiles, GROUP) * GROUP * columns)
    shared = (in_a, in_b, in_out)
    scales = (of_a, a_row, of_b, of_out, out_row)
    gl.warp_specialize(
        [
            (
                produce,
                (
                    a, b, shared, barriers, experts, order, pairs, work, depth, width,
                    GATED, GROUPED, GROUP, HALVES, STAGES,
                ),
            ),
            (
                consume,
                (
                    shared, barriers, scales, experts, order, pairs, out, work, depth, width,
                    GATED, LIMIT, POWERS, GROUPED, GROUP, HALVES, STAGES, 0,
                ),
            ),
            (
                consume,
                (
                    shared, barriers, scales, experts, order, pairs, out, work, depth, width,
                    GATED, LIMIT, POWERS, GROUPED, GROUP, HALVES, STAGES, 1,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip
