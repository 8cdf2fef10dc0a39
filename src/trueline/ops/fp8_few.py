# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)
"""A few rows of fp8 times a matrix of block fp8 on Hopper GPUs, in Gluon. The weight is the left
operand of the tensor cores and the rows of x are its columns, as few as 8; its bytes are the cost,
so the depth is split over as many programs as it takes to have all of the memory's speed. The last
program of a tile to finish adds up the parts, in their order.

x comes in fp8; or, where a program's part of very few rows fits, as numbers, which each program
quantises bit by bit as `fp8.quantise` does, while its weights are on their way: a launch less."""

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
from trueline.ops.gluon import made_barriers
from trueline.ops.jit import Launcher

BLOCK = gl.constexpr(128)
"""Rows of the weight, and columns of a step."""
WRITTEN = gl.constexpr(gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1]))
READ = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Of numbers: 16 threads have those that share a scale."""
FRACTION = gl.constexpr(2**23 - 1)


@gluon.jit
def load_weights(weight, in_w, full, n, k, stage, T: gl.constexpr):
    """With the T rows that `load_rows` will bring."""
    bar = full.index(stage)
    mbarrier.expect(bar, (BLOCK + T) * BLOCK)
    tma.async_copy_global_to_shared(weight, [n * BLOCK, k * BLOCK], bar, in_w.index(stage))


@gluon.jit
def load_rows(x, in_x, full, m, k, stage, T: gl.constexpr):
    tma.async_copy_global_to_shared(x, [m * T, k * BLOCK], full.index(stage), in_x.index(stage))


@gluon.jit
def load_numbers(x, x_row, row, rows, k, depth):
    column = k * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, READ))
    at = x + row.to(gl.int64)[:, None] * x_row + column[None, :]
    return gl.load(at, mask=(row < rows)[:, None] & (column < depth)[None, :], other=0.0)


@gluon.jit
def quantised(x):
    """[T, BLOCK] numbers -> codes, and the scale of each row, a power of two."""
    x = x.to(gl.float32)
    scale = gl.div_rn(gl.maximum(gl.max(gl.abs(x), axis=1), SMALLEST), LARGEST)
    bits = scale.to(gl.int32, bitcast=True)
    scale = ((bits + FRACTION) & (-1 - FRACTION)).to(gl.float32, bitcast=True)
    x = x * gl.div_rn(1.0, scale)[:, None]  # exact
    return x.to(gl.float8e4nv), scale


@gluon.jit
def multiplied(in_w, in_x, T: gl.constexpr):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    sums = warpgroup_mma(
        in_w, in_x.permute((1, 0)), gl.zeros([BLOCK, T], gl.float32, SUMS), use_acc=False,
        is_async=True,
    )  # fmt: skip
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def leave(
    acc, out, parts, arrived, n, part, m, rows, width, T: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    """The sums of a tile, or a split's part of them."""
    row = n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WRITTEN))
    at_token = m * T + gl.arange(0, T, gl.SliceLayout(0, WRITTEN))
    inside = (row < width)[:, None] & (at_token < rows)[None, :]
    to = at_token.to(gl.int64)[None, :] * width + row[:, None]
    y = gl.convert_layout(acc, WRITTEN)
    if SPLIT > 1:
        gl.store(parts + part * (rows * width).to(gl.int64) + to, y, inside)
        gl.thread_barrier()
        tile = m * gl.num_programs(0) + n
        if gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            y = gl.zeros([BLOCK, T], gl.float32, WRITTEN)
            for each in range(SPLIT):
                y += gl.load(parts + each * (rows * width).to(gl.int64) + to, inside, 0.0)
            gl.store(out + to, y.to(out.dtype.element_ty), inside)
            gl.store(arrived + tile, 0)
    else:
        gl.store(out + to, y.to(out.dtype.element_ty), inside)


def kernel(**options):
    return lambda fn: Launcher(gluon.jit(fn, **options), num_warps=4, launch_pdl=True)


@kernel(do_not_specialize=["x_row", "rows"])
def few(
    weight, x, of_weight, of_x, x_row, out, parts, arrived, rows, depth, width,
    T: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [rows, width] = x [rows, depth] × weightᵀ. Scales of x are [depth / 128, x_row], those of
    the weight [width / 128, depth / 128], rounded up. parts: float32 [SPLIT, rows, width];
    arrived: a zero for each tile of 128 × T, and zero again at the end."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    in_w = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK, BLOCK], weight.layout)
    in_x = gl.allocate_shared_memory(x.dtype, [STAGES, T, BLOCK], x.layout)
    full = made_barriers(STAGES, 1)
    fence_async_shared()
    gl.thread_barrier()
    n, part, m = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    steps = gl.cdiv(depth, BLOCK)
    first, last = part * steps // SPLIT, (part + 1) * steps // SPLIT
    for early in gl.static_range(STAGES):  # weights are there before the rows are
        if first + early < last:
            load_weights(weight, in_w, full, n, first + early, early, T)
    gdc_wait()
    gdc_launch_dependents()
    for early in gl.static_range(STAGES):
        if first + early < last:
            load_rows(x, in_x, full, m, first + early, early, T)
    token = m * T + gl.arange(0, T, gl.SliceLayout(0, SUMS))
    x_at = of_x + gl.minimum(token, rows - 1)
    w_at = of_weight + n * steps
    acc = gl.zeros([BLOCK, T], gl.float32, SUMS)
    scale = gl.load(x_at + first * x_row) * gl.load(w_at + first)
    for k in range(first, last):
        now = scale
        then = gl.minimum(k + 1, last - 1)
        scale = gl.load(x_at + then * x_row) * gl.load(w_at + then)
        at = k - first
        stage = at % STAGES
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        sums = multiplied(in_w.index(stage), in_x.index(stage), T)
        gl.thread_barrier()
        if k + STAGES < last:
            load_weights(weight, in_w, full, n, k + STAGES, stage, T)
            load_rows(x, in_x, full, m, k + STAGES, stage, T)
        acc += sums * now[None, :]
    leave(acc, out, parts, arrived, n, part, m, rows, width, T, SPLIT)


@kernel(do_not_specialize=["rows"])
def few_numbers(
    weight, x, x_row, of_weight, out, parts, arrived, rows, depth, width,
    T: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """`few` of numbers, whose scales are powers of two; a program has STEPS steps at most."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    in_w = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK, BLOCK], weight.layout)
    in_x = gl.allocate_shared_memory(weight.dtype, [STEPS, T, BLOCK], weight.layout)
    full = made_barriers(STAGES, 1)
    fence_async_shared()
    gl.thread_barrier()
    n, part, m = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    steps = gl.cdiv(depth, BLOCK)
    first, last = part * steps // SPLIT, (part + 1) * steps // SPLIT
    for early in gl.static_range(STAGES):
        if first + early < last:
            load_weights(weight, in_w, full, n, first + early, early, 0)
    w_at = of_weight + n * steps
    of_steps = ()
    for i in gl.static_range(STEPS):
        of_steps = of_steps + (gl.load(w_at + gl.minimum(first + i, last - 1)),)
    gdc_wait()
    gdc_launch_dependents()
    row = m * T + gl.arange(0, T, gl.SliceLayout(1, READ))
    numbers = ()
    for i in gl.static_range(STEPS):  # behind the last step: what nobody multiplies
        numbers = numbers + (load_numbers(x, x_row, row, rows, first + i, depth),)
    scales = ()
    for i in gl.static_range(STEPS):
        codes, of_row = quantised(numbers[i])
        in_x.index(i).store(codes)
        scales = scales + (gl.convert_layout(of_row, gl.SliceLayout(0, SUMS)) * of_steps[i],)
    fence_async_shared()
    gl.thread_barrier()
    acc = gl.zeros([BLOCK, T], gl.float32, SUMS)
    for i in gl.static_range(STEPS):
        if first + i < last:
            mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
            sums = multiplied(in_w.index(i % STAGES), in_x.index(i), T)
            gl.thread_barrier()
            if first + i + STAGES < last:
                load_weights(weight, in_w, full, n, first + i + STAGES, i % STAGES, 0)
            acc += sums * scales[i][None, :]
    leave(acc, out, parts, arrived, n, part, m, rows, width, T, SPLIT)
