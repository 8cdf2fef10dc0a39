# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A few rows times int4 or fp4 weights (fragments.py) on Hopper GPUs, in Gluon: the stored codes go
from memory to registers once, where they become bfloat16, which has all of them exactly, fp4's
times their scales too. Of int4, tensor cores sum the products of a scale's columns; these sums are
scaled and added in float32.

The columns that a thread multiplies stand in the order in which rows of x are loaded, eight
neighbours at a time: a sum does not depend on an order of columns that both sides share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
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
from trueline.ops.gluon import swiglu
from trueline.ops.jit import Launcher

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
TOKENS = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
# Of numbers of x: a thread has eight neighbours of the tokens of its accumulators.
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
        [],
        [8, 4, 8],
    )
)
T = gl.constexpr(8)
"""Pairs of a tile."""


@gluon.jit
def tokens_of(x, inside):
    """x: where 8 neighbours of [T, 4, 8] are -> [32, T] for the tensor cores."""
    value = gl.load(x) if inside is None else gl.load(x, mask=inside, other=0)
    value = gl.permute(gl.reshape(value, (T, 4, 2, 2, 2)), (2, 3, 1, 4, 0))
    return gl.convert_layout(gl.reshape(value, (32, T)), TOKENS, assert_trivial=True)


@gluon.jit
def add_chunks(
    acc, words, stored, x_at, column, rest,
    CHUNKS: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """acc [64, T] and what CHUNKS chunks of columns add. x_at, column [T, 4, 8]: of the first
    block; rest: columns from there on, if they may end among these."""
    BLOCKS: gl.constexpr = GROUP // 32
    EXACT: gl.constexpr = FORM == "fp4"
    scales = columns_of(powers(stored) if EXACT else stored.to(gl.float32), 256 // GROUP)
    for i in gl.static_range(2 * CHUNKS):
        first, second = blocks_of(words[i // 2])
        weights = decoded(second if i % 2 else first, scales[i // BLOCKS] if EXACT else None, FORM)
        weights = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
        tokens = tokens_of(x_at + i * 32, None if rest is None else column + i * 32 < rest)
        if EXACT:
            acc = mma_v2(weights, tokens, acc)
        else:
            if i % BLOCKS == 0:
                part = gl.zeros([64, T], gl.float32, MMA)
            part = mma_v2(weights, tokens, part)
            if i % BLOCKS == BLOCKS - 1 or i == 2 * CHUNKS - 1:
                scale = gl.convert_layout(scales[i // BLOCKS], OF_ROWS, assert_trivial=True)
                acc += part * scale[:, None]
    return acc


@gluon.jit
def load_words(at, CHUNKS: gl.constexpr):
    a = gl.load(at)
    b = gl.load(at + 512) if CHUNKS > 1 else a
    c = gl.load(at + 1024) if CHUNKS > 2 else a
    d = gl.load(at + 1536) if CHUNKS > 3 else a
    return a, b, c, d


def kernel(**options):
    return lambda fn: Launcher(gluon.jit(fn, **options), num_warps=4, launch_pdl=True)


@gluon.jit
def store(
    acc, order, weights, out, n, pairs, width, GATED: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """What 64 rows of the weight give for a tile's T pairs, whose numbers are in `order`."""
    if GATED:
        both = gl.permute(gl.reshape(acc, (4, 2, 8, T)), (0, 2, 3, 1))
        gate, up = gl.split(both)
        y = swiglu(gate, up, LIMIT)
        SPLIT: gl.constexpr = y.type.layout
        warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, SPLIT)))[:, None, None]
        lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, SPLIT)))[None, :, None]
        token = gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(1, SPLIT)))
        to = gl.load(order + token)[None, None, :]
        place = n * 32 + warp * 8 + lane
    else:
        to = gl.load(order + gl.arange(0, T, gl.SliceLayout(0, MMA)))
        y = acc * gl.load(weights + to, to < pairs, 0.0)[None, :]
        to = to[None, :]
        place = (n * 64 + gl.arange(0, 64, OF_ROWS))[:, None]
    at = out + to.to(gl.int64) * width + place
    gl.store(at, y.to(out.dtype.element_ty), (to < pairs) & (place < width))


@kernel(do_not_specialize=["pairs", "each", "columns"])
def stream_fragments(
    x, x_row, packed, scales, order, tiles, total, weights, out, pairs, depth, width, each, columns,
    TOP: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """A program per tile of T pairs of one expert and `each` of the `columns` tiles of 64 rows of
    the weight, which are one stream; as `kernels.grouped` otherwise. STEPS: whether there are steps
    of 256 columns; TAIL: chunks of 64 columns after the last, whose columns may end before they do;
    `each` is 1 then. What is not GATED follows the kernel that is, which waited for the pairs to be
    sorted: their order, and the first weights, are loaded while that one still runs."""
    EACH: gl.constexpr = 256 // GROUP
    TAIL_GROUPS: gl.constexpr = (TAIL * 64 + GROUP - 1) // GROUP
    SCALES: gl.constexpr = scale_layout(EACH)
    if GATED:
        gdc_wait()
        gdc_launch_dependents()
    m, n = gl.program_id(1), gl.program_id(0) * each
    if m >= gl.load(total):
        if not GATED:
            gdc_wait()
            gdc_launch_dependents()
        return
    steps = depth // 256
    tile = gl.load(tiles + m).to(gl.int64) * columns + n
    thread = gl.arange(0, 128, gl.SliceLayout(1, WORDS))
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))
    word_at = packed + tile * (steps * 2048 + TAIL * 512) + thread[:, None] * 4 + word[None, :]
    row = gl.arange(0, 64, gl.SliceLayout(1, SCALES))[:, None]
    group = gl.arange(0, EACH, gl.SliceLayout(0, SCALES))[None, :]
    scale_at = scales + tile * (steps * (64 * EACH) + 64 * TAIL_GROUPS)
    t = gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    order += m * T
    # what stands behind an expert's last pair multiplies the rows of its first: nobody stores that
    pair = gl.load(order + t)
    pair = gl.where(pair < pairs, pair, gl.load(order))
    source = (pair // TOP if GATED else pair).to(gl.int64)
    column = quad[None, :, None] * 8 + eight[None, None, :]
    x_at = x + source[:, None, None] * x_row + column
    acc = gl.zeros([64, T], gl.float32, MMA)
    if STEPS:
        last = gl.minimum(each, columns - n) * steps - 1
        step = 0
        w0, w1, w2, w3 = load_words(word_at, 4)
        stored = gl.load(scale_at + row * EACH + group)
    if not GATED:
        gdc_wait()
        gdc_launch_dependents()
    if STEPS:
        for at in range(last + 1):
            words, mine = (w0, w1, w2, w3), stored
            then = gl.minimum(at + 1, last)
            w0, w1, w2, w3 = load_words(word_at + then * 2048, 4)
            stored = gl.load(scale_at + then * (64 * EACH) + row * EACH + group)
            acc = add_chunks(acc, words, mine, x_at + step * 256, column, None, 4, FORM, GROUP)
            step += 1
            if TAIL == 0 and step == steps:
                store(acc, order, weights, out, n, pairs, width, GATED, LIMIT)
                acc = gl.zeros([64, T], gl.float32, MMA)
                step = 0
                n += 1
    if TAIL:
        words = load_words(word_at + steps * 2048, TAIL)
        stored = tail_scales(scale_at + steps * (64 * EACH), GROUP, TAIL)
        x_at += steps * 256
        acc = add_chunks(acc, words, stored, x_at, column, depth % 256, TAIL, FORM, GROUP)
        store(acc, order, weights, out, n, pairs, width, GATED, LIMIT)
