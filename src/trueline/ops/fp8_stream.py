# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A few rows of experts times block fp8 on Hopper GPUs, in Gluon: codes go from memory to registers
once, where they become bfloat16, which has all of them exactly. Small programs, so that all of the
GPU reads until the end.

A thread of the tensor cores' layout has rows g and g + 8 of a warp's 16, and 16 neighbours out of
each 64 columns, in the order in which the rows of x are loaded: sums do not depend on an order of
columns that both sides share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trueline.ops.jit import Launcher

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
TOKENS = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
# Bytes 0 and 2, and 1 and 3, of a word as two bfloat16 numbers each.
FP8 = gl.constexpr("""{
    .reg .b32 t<2>, s<2>, power, size, sign;
    mov.b32 power, 0x7B807B80;
    mov.b32 size, 0x07F007F0;
    mov.b32 sign, 0x80008000;
    shl.b32 t0, $4, 4;
    shr.u32 t1, $4, 4;
    shl.b32 s0, $4, 8;
    and.b32 s1, $4, sign;
    and.b32 s0, s0, sign;
    lop3.b32 t0, t0, size, s0, 0xEA;
    lop3.b32 t1, t1, size, s1, 0xEA;
    mul.rn.bf16x2 t0, t0, power;
    mul.rn.bf16x2 t1, t1, power;
    mov.b32 {$0, $1}, t0;
    mov.b32 {$2, $3}, t1;
}""")
LINES = gl.constexpr(gl.BlockedLayout([1, 1, 4], [32, 1, 1], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def weights_of(words):
    """[128 threads, 2 halves, 4 words] int32 -> [64, 64] for the tensor cores."""
    o = gl.inline_asm_elementwise(
        FP8, "=h,=h,=h,=h,r", [words],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    every = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    every = gl.reshape(every, (4, 8, 4, 2, 4, 2, 2))
    rows = gl.reshape(gl.permute(every, (0, 3, 1, 4, 6, 2, 5)), (64, 64))
    return gl.convert_layout(rows, WEIGHTS, assert_trivial=True)


@gluon.jit
def tokens_of(x, inside, T: gl.constexpr):
    """x: where 16 neighbours of [T, 4, 16] are -> [64, T] for the tensor cores."""
    value = gl.load(x, mask=inside, other=0)
    value = gl.permute(gl.reshape(value, (T, 4, 4, 2, 2)), (2, 4, 1, 3, 0))
    return gl.convert_layout(gl.reshape(value, (64, T)), TOKENS, assert_trivial=True)


@gluon.jit(do_not_specialize=["pairs", "x_scale_row"])
def _product(
    x, x_row, x_scales, x_scale_row, weight, scales, order, experts, total, pair_weights, out,
    pairs, depth, width,
    TOP: gl.constexpr, SHARED: gl.constexpr, GATED: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """A program per 64 rows of the weight and tile of T pairs of one expert (8 or 16). GATED: out
    [pairs, width] = silu(gate x) × up x, x a row per token. Otherwise weight × (down x), x a row
    per pair. weight: [experts × rows, depth], as words; scales [experts × rows / 128, depth / 128].
    x: codes of activations in bfloat16, x_scales [depth / 128, x_scale_row] theirs. The kernel
    before wrote nothing but these two."""
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]] + ([[8, 0, 0]] if T > 8 else []),
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
        [],
        [T, 4, 16],
    )
    OUT: gl.constexpr = gl.SliceLayout(0, MMA)
    EACH: gl.constexpr = TOP + SHARED
    m, n = gl.program_id(1), gl.program_id(0)
    if m >= gl.load(total):
        return
    expert = gl.load(experts + m).to(gl.int64)
    rows = 2 * width if GATED else width
    steps = depth // 128
    words = depth // 4
    thread = gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, LINES)))[:, None, None]
    side = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LINES)))[None, None, :]
    warp, lane = thread // 32, thread % 32 // 4
    if GATED:
        row = n * 32 + warp * 8 + lane + side * width
        block = n * 32 // 128
        between = width // 128
    else:
        row = n * 64 + warp * 16 + side * 8 + lane
        block = n * 64 // 128
        between = 0
    w_at = weight + (expert * rows + row) * words + thread % 4 * 4 + word
    w0, w1 = gl.load(w_at), gl.load(w_at + 16)
    s_at = scales + (expert * (rows // 128) + block) * steps
    t = gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    some = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    pair = gl.load(order + m * T + t)
    live = (pair < pairs)[:, None, None]
    source = (pair // EACH if GATED else pair).to(gl.int64)
    x_at = x + source[:, None, None] * x_row + quad[None, :, None] * 16 + some[None, None, :]
    to = gl.load(order + m * T + gl.arange(0, T, OUT))
    token = gl.minimum(to, pairs - 1)
    xs_at = x_scales + (token // EACH if GATED else token)
    upper = gl.arange(0, 64, OF_ROWS) % 16 >= 8
    acc = gl.zeros([64, T], gl.float32, MMA)
    gdc_wait()
    gdc_launch_dependents()
    for step in range(steps):
        now0, now1 = w0, w1
        then = gl.minimum(step + 1, steps - 1)
        w0, w1 = gl.load(w_at + then * 32), gl.load(w_at + then * 32 + 16)
        part = gl.zeros([64, T], gl.float32, MMA)
        part = mma_v2(weights_of(now0), tokens_of(x_at + step * 128, live, T), part)
        part = mma_v2(weights_of(now1), tokens_of(x_at + step * 128 + 64, live, T), part)
        scale = gl.where(upper, gl.load(s_at + between * steps + step), gl.load(s_at + step))
        acc += part * (scale[:, None] * gl.load(xs_at + step * x_scale_row)[None, :])
    if GATED:
        both = gl.permute(gl.reshape(acc, (4, 2, 8, T)), (0, 2, 3, 1))
        gate, up = gl.split(both)
        y = gate / (1 + gl.exp(-gate)) * up
        HALF: gl.constexpr = y.type.layout
        warps = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, HALF)))
        lower = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, HALF)))
        each = gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(1, HALF)))
        target = gl.load(order + m * T + each)[None, None, :]
        column = n * 32 + warps[:, None, None] * 8 + lower[None, :, None]
        at = out + target.to(gl.int64) * width + column
        gl.store(at, y.to(out.dtype.element_ty), target < pairs)
    else:
        choice = to % EACH
        known = (to < pairs) & (choice < TOP)
        factor = gl.load(pair_weights + to // EACH * TOP + choice, known, 1.0)
        y = acc * factor[None, :]
        column = n * 64 + gl.arange(0, 64, OF_ROWS)
        at = out + to.to(gl.int64)[None, :] * width + column[:, None]
        gl.store(at, y.to(out.dtype.element_ty), (to < pairs)[None, :])


product = Launcher(_product, num_warps=4, launch_pdl=True)
