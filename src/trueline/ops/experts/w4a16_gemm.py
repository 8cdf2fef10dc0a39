# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Many rows times int4 or fp4 weights (fragments.py), grouped by expert, on Hopper GPUs, in Gluon.

Persistent and warp specialised: producer warps copy fragments, scales and rows of x ahead; two
consumer warp groups have 64 rows of the weight each, dequantise them in registers, where each
number is rounded once to bfloat16, and multiply them with the same pairs. While a warp group's MMAs
of 64 columns run, it dequantises the next 64."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trueline.ops.experts.fragment_kernels import (
    WORDS,
    blocks_of,
    columns_of,
    decoded,
    powers,
    scale_layout,
    tail_scales,
)
from trueline.ops.gluon import (
    CONSUMER_REGISTERS,
    COPIED,
    OPERAND,
    PRODUCER_THREADS,
    copy_columns,
    kernel,
    made_barriers,
    signal,
    signal_copied,
    swiglu,
)

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def scale_copy_layout(each):
    """Of [128, each] scales: a thread copies a row."""
    return gl.BlockedLayout([1, each], [32, 1], [4, 1], [1, 0])


@gluon.constexpr_function
def sums_layout(count):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, count, 16])


@gluon.jit
def produce(
    shared, barriers, sources, work,
    TOP: gl.constexpr, T: gl.constexpr, GATED: gl.constexpr, GROUP: gl.constexpr,
    STEPS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    EACH: gl.constexpr = 256 // GROUP
    TAIL_GROUPS: gl.constexpr = (TAIL * 64 + GROUP - 1) // GROUP
    SCALE_COPY: gl.constexpr = scale_copy_layout(EACH)
    in_x, in_words, in_scales = shared
    full, empty = barriers
    x, x_row, packed, scales = sources
    order, tiles, pairs, steps, columns, count = work
    both = gl.cdiv(columns, 2)
    thread = gl.arange(0, 128, gl.SliceLayout(1, WORDS))
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))
    lane = thread[:, None] * 4 + word[None, :]
    i = gl.arange(0, T, gl.SliceLayout(1, COPIED))
    row = gl.arange(0, 128, gl.SliceLayout(1, SCALE_COPY))[:, None]
    group = gl.arange(0, EACH, gl.SliceLayout(0, SCALE_COPY))[None, :]
    loaded = 0
    slot = 0
    for at in range(gl.program_id(0), count, gl.num_programs(0)):
        m, n = at // both, at % both * 2
        tile = gl.load(tiles + m).to(gl.int64) * columns + n
        other = gl.where(n + 1 < columns, 1, 0)
        pair = gl.load(order + m * T + i)
        source = (pair // TOP if GATED else pair).to(gl.int64)
        x_at = x + source * x_row
        word_at = packed + tile * (steps * 2048 + TAIL * 512) + lane
        second = other * (steps * 2048 + TAIL * 512)
        scale_at = scales + tile * (steps * (64 * EACH) + 64 * TAIL_GROUPS)
        scale_at += row // 64 * other * (steps * (64 * EACH) + 64 * TAIL_GROUPS)
        scale_at += row % 64 * EACH + group
        for chunk in range(4 * steps + TAIL):
            stage = loaded % STAGES
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            if STEPS and (chunk % 4 == 0) & (chunk < 4 * steps):
                async_copy.async_copy_global_to_shared(
                    in_scales.index(slot % SLOTS), scale_at + chunk * (16 * EACH)
                )
                slot += 1
            async_copy.async_copy_global_to_shared(in_words.index(2 * stage), word_at)
            async_copy.async_copy_global_to_shared(in_words.index(2 * stage + 1), word_at + second)
            copy_columns(in_x.index(stage), x_at, pair < pairs, 0, 64)
            signal_copied(full.index(stage))
            word_at += 512
            x_at += 64
            loaded += 1


@gluon.jit
def operand(words, first_scale, second_scale, FORM: gl.constexpr, SUMS: gl.constexpr):
    """Of 64 columns of the own 64 rows."""
    first, second = blocks_of(words)
    first, second = decoded(first, first_scale, FORM), decoded(second, second_scale, FORM)
    a = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (64, 64))
    return gl.convert_layout(a, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def scales_of(stored, FORM: gl.constexpr, EACH: gl.constexpr):
    """As stored -> each group's as `decoded` takes them."""
    return columns_of(powers(stored) if FORM == "fp4" else stored, EACH)


@gluon.jit
def multiply(
    shared, barriers, work, scales, order, weights, out, tile, n, used, slot, width, pairs,
    N: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """64 rows of a weight times the first N pairs of a tile."""
    EACH: gl.constexpr = 256 // GROUP
    TAIL_GROUPS: gl.constexpr = (TAIL * 64 + GROUP - 1) // GROUP
    SCALES: gl.constexpr = scale_layout(EACH)
    SUMS: gl.constexpr = sums_layout(N)
    in_x, in_words, in_scales = shared
    full, empty = barriers
    _, _, _, steps, columns, _ = work
    acc = gl.zeros([64, N], gl.float32, SUMS)
    if STEPS:
        mbarrier.wait(full.index(used % STAGES), (used // STAGES) & 1)
        own = in_scales.index(slot % SLOTS).slice(WHO * 64, 64, dim=0)
        each = scales_of(own.load(SCALES), FORM, EACH)
        words = in_words.index(used % STAGES * 2 + WHO).load(WORDS)
        a = operand(words, each[0], each[32 // GROUP], FORM, SUMS)
        for step in range(steps):
            for i in gl.static_range(1, 5):
                x = in_x.index(used % STAGES).slice(0, N, dim=0)
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
                # of the last: once more itself, which is not empty yet
                then = used + 1 if i < 4 else used + gl.where(step + 1 < steps, 1, 0)
                mbarrier.wait(full.index(then % STAGES), (then // STAGES) & 1)
                if i == 4:
                    slot += 1
                    of = gl.where(step + 1 < steps, slot, slot - 1) % SLOTS
                    own = in_scales.index(of).slice(WHO * 64, 64, dim=0)
                    each = scales_of(own.load(SCALES), FORM, EACH)
                words = in_words.index(then % STAGES * 2 + WHO).load(WORDS)
                a = operand(
                    words, each[i % 4 * 64 // GROUP], each[(i % 4 * 64 + 32) // GROUP], FORM, SUMS
                )
                acc, a = warpgroup_mma_wait(0, deps=[acc, a])
                signal(empty.index(used % STAGES))
                used += 1
    if TAIL:
        at = scales + tile * (steps * (64 * EACH) + 64 * TAIL_GROUPS) + steps * (64 * EACH)
        each = scales_of(tail_scales(at, GROUP, TAIL), FORM, EACH)
        for i in gl.static_range(TAIL):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            words = in_words.index(2 * stage + WHO).load(WORDS)
            a = operand(words, each[i * 64 // GROUP], each[(i * 64 + 32) // GROUP], FORM, SUMS)
            x = in_x.index(stage).slice(0, N, dim=0)
            acc = warpgroup_mma(a, x.permute((1, 0)), acc)
            signal(empty.index(stage))
            used += 1
    if n < columns:
        if GATED:
            store_gated(acc, order, out, n, pairs, width, N, LIMIT)
        else:
            store(acc, order, weights, out, n, pairs, width, N)
    return used, slot


@gluon.jit
def store_gated(acc, order, out, n, pairs, width, N: gl.constexpr, LIMIT: gl.constexpr):
    """silu(gate) × up, in the order of fragments: of 32 columns, number 8 q + 4 j + 2 h + e stands
    at 16 j + 8 h + 2 q + e."""
    gate, up = gl.split(gl.permute(gl.reshape(acc, (4, 2, 8, N)), (0, 2, 3, 1)))
    y = swiglu(gate, up, LIMIT)
    SPLIT: gl.constexpr = y.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, SPLIT)))[:, None, None]
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, SPLIT)))[None, :, None]
    pair = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, SPLIT)))
    to = gl.load(order + pair)[None, None, :]
    place = n * 32 + lane // 4 * 16 + lane // 2 % 2 * 8 + warp * 2 + lane % 2
    at = out + to.to(gl.int64) * width + place
    gl.store(at, y.to(out.dtype.element_ty), to < pairs)


@gluon.jit
def store(acc, order, weights, out, n, pairs, width, N: gl.constexpr):
    """Times the weight of each pair; 64 neighbours at a time."""
    SUMS: gl.constexpr = sums_layout(N)
    WRITTEN: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    of = gl.load(order + gl.arange(0, N, gl.SliceLayout(0, SUMS)))
    y = acc * gl.load(weights + of, of < pairs, 0.0)[None, :]
    y = gl.convert_layout(y.to(out.dtype.element_ty), WRITTEN)
    to = gl.load(order + gl.arange(0, N, gl.SliceLayout(0, WRITTEN)))[None, :]
    place = (n * 64 + gl.arange(0, 64, gl.SliceLayout(1, WRITTEN)))[:, None]
    gl.store(out + to.to(gl.int64) * width + place, y, (to < pairs) & (place < width))


@gluon.jit
def consume(
    shared, barriers, work, scales, weights, out, width,
    T: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, HALVE: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    order, tiles, pairs, _, columns, count = work
    both = gl.cdiv(columns, 2)
    used = 0
    slot = 0
    for at in range(gl.program_id(0), count, gl.num_programs(0)):
        m, n = at // both, at % both * 2 + WHO
        tile = gl.load(tiles + m).to(gl.int64) * columns + gl.minimum(n, columns - 1)
        mine = order + m * T
        if HALVE:
            if gl.load(mine + T // 2) < pairs:
                used, slot = multiply(
                    shared, barriers, work, scales, mine, weights, out, tile, n, used, slot, width,
                    pairs, T, GATED, LIMIT, FORM, GROUP, STEPS, TAIL, STAGES, SLOTS, WHO,
                )  # fmt: skip
            else:
                used, slot = multiply(
                    shared, barriers, work, scales, mine, weights, out, tile, n, used, slot, width,
                    pairs, T // 2, GATED, LIMIT, FORM, GROUP, STEPS, TAIL, STAGES, SLOTS, WHO,
                )  # fmt: skip
        else:
            used, slot = multiply(
                shared, barriers, work, scales, mine, weights, out, tile, n, used, slot, width,
                pairs, T, GATED, LIMIT, FORM, GROUP, STEPS, TAIL, STAGES, SLOTS, WHO,
            )  # fmt: skip


@kernel(do_not_specialize=["pairs"])
def grouped_gemm(
    x, x_row, packed, scales, order, tiles, total, weights, out, pairs, depth, width, columns,
    TOP: gl.constexpr, T: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
    FORM: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, HALVE: gl.constexpr,
):  # fmt: skip
    """x [·, x_row] with its columns in the order of fragments, x_row whole chunks of 64. GATED: a
    row per token; out [pairs, width] is in that order too. Otherwise a row per pair. `columns`:
    tiles of 64 rows of an expert's weight. HALVE: an expert's last tile costs half, if it is at
    most half full."""
    gdc_wait()
    gdc_launch_dependents()
    # scales of steps, of which each has four stages
    SLOTS: gl.constexpr = (STAGES + 3) // 4 + 1
    in_x = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, T, 64], OPERAND)
    in_words = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 128, 4], FLAT)
    in_scales = gl.allocate_shared_memory(scales.dtype.element_ty, [SLOTS, 128, 256 // GROUP], FLAT)
    shared = (in_x, in_words, in_scales)
    barriers = (made_barriers(STAGES, PRODUCER_THREADS), made_barriers(STAGES, 2))
    fence_async_shared()
    count = gl.load(total) * gl.cdiv(columns, 2)
    sources = (x, x_row, packed, scales)
    work = (order, tiles, pairs, depth // 256, columns, count)
    gl.warp_specialize(
        [
            (
                produce,
                (
                    shared, barriers, sources, work, TOP, T, GATED, GROUP, STEPS, TAIL, STAGES,
                    SLOTS,
                ),
            ),
            (
                consume,
                (
                    shared, barriers, work, scales, weights, out, width, T, GATED, LIMIT, FORM,
                    GROUP, STEPS, TAIL, STAGES, SLOTS, HALVE, 0,
                ),
            ),
            (
                consume,
                (
                    shared, barriers, work, scales, weights, out, width, T, GATED, LIMIT, FORM,
                    GROUP, STEPS, TAIL, STAGES, SLOTS, HALVE, 1,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip
