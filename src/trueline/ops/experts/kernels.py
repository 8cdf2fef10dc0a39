# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""More tokens: pairs sorted by expert into tiles of equally many rows, a GEMM per tile, and the
sum over a token's pairs at the end. Asynchronous: grids have room for the worst case, and
programs without a tile return immediately. Numbers that change from step to step are not
specialized on, or kernels would be compiled again for them."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.experts.pairs import expert_of, weight_of
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import swiglu


@kernel(do_not_specialize=["pairs", "first", "held"])
def count(
    ids, counts, pairs, first, held,
    TOP: tl.constexpr, SHARED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts [segments, BINS]: how many pairs of a segment of BLOCK each expert has."""
    pdl_wait()
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of(ids, pair, pair < pairs, first, held, TOP, SHARED)
    found = tl.histogram(expert, BINS, mask=(expert >= 0) & (pair < pairs))
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@kernel(do_not_specialize=["pairs", "first", "held", "segments", "tile"])
def place(
    ids, counts, order, tiles, total, places, pairs, first, held, segments, tile,
    TOP: tl.constexpr, SHARED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, ALONE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A program per expert and segment. `order` gets the expert's pairs as they come, filled up to
    whole tiles (of at most MOST rows) with `pairs`, which no pair has; `tiles` the expert of each
    tile; `total` their number; with PLACES, `places` where each pair is. ALONE: there is one
    segment, and each program counts it itself."""
    pdl_wait()
    expert, segment = tl.program_id(0), tl.program_id(1)
    pair = segment * BLOCK + tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    theirs = expert_of(ids, pair, pair < pairs, first, held, TOP, SHARED)
    before = tl.zeros((BINS,), tl.int32)
    if ALONE:
        every = tl.histogram(theirs, BINS, mask=(theirs >= 0) & (pair < pairs))
    else:
        every = tl.zeros((BINS,), tl.int32)
        for s in range(segments):
            found = tl.load(counts + s * BINS + bins)
            every += found
            before += tl.where(s < segment, found, 0)
    needed = tl.cdiv(every, tile)
    start = tl.sum(tl.where(bins < expert, needed, 0), axis=0)
    mine = tl.sum(tl.where(bins == expert, every, 0), axis=0)
    earlier = tl.sum(tl.where(bins == expert, before, 0), axis=0)
    match = (theirs == expert) & (pair < pairs)
    rank = earlier + tl.cumsum(match.to(tl.int32), axis=0) - 1
    order += start * tile
    tl.store(order + rank, pair, mask=match)
    if PLACES:
        tl.store(places + pair, start * tile + rank, mask=match)
    if segment == 0:
        own = tl.cdiv(mine, tile)
        rest = mine + tl.arange(0, MOST)
        tl.store(order + rest, pairs, mask=rest < own * tile)
        for i in range(0, own, 32):
            here = i + tl.arange(0, 32)
            tl.store(tiles + start + here, expert, mask=here < own)
        if expert == tl.num_programs(0) - 1:
            tl.store(total, start + own)


@triton.jit
def columns_of(n, width, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Output columns of tile n, and the weight rows they need: a gated column needs two, gate and
    up, which alternate so that both end up in the same thread."""
    row = tl.arange(0, BLOCK_N)
    if GATED:
        columns = n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        rows = tl.minimum(n * (BLOCK_N // 2) + row // 2, width - 1) + (row % 2) * width
    else:
        columns = n * BLOCK_N + row
        rows = tl.minimum(columns, width - 1)
    return columns, rows


@triton.jit
def _product(
    x_at, weight_at, live, inner, depth,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]. SWAP: the weights are the left operand, which must have 64 rows to run
    at full speed; tokens may then be as few as 16."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at, mask=live[:, None], other=0)
            b = tl.load(weight_at)
        else:
            inside = (inner < depth - k)[None, :]
            a = tl.load(x_at, mask=live[:, None] & inside, other=0)
            b = tl.load(weight_at, mask=inside, other=0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _tile(
    x, x_row, weight, weights, out, rows, live, expert, n, depth, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Pairs `rows` times tile n of the expert's columns."""
    columns, weight_rows = columns_of(n, width, GATED, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    size = (2 if GATED else 1) * width * depth
    weight_at = weight + expert.to(tl.int64) * size + weight_rows[:, None] * depth + inner[None, :]
    source = (rows // (TOP + SHARED) if GATED else rows).to(tl.int64)
    x_at = x + source[:, None] * x_row + inner[None, :]
    acc = _product(x_at, weight_at, live, inner, depth, SWAP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        y = swiglu(gate, up, LIMIT)
    else:
        y = acc * weight_of(weights, rows, live, TOP, SHARED)[:, None]
    to = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live[:, None] & (columns < width)[None, :])


@kernel(do_not_specialize=["pairs"])
def grouped(
    x, x_row, weight, weights, out, order, tiles, total, pairs, depth, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, GROUP: tl.constexpr, HALVE: tl.constexpr,
):  # fmt: skip
    """GATED: out [pairs, width] = silu(gate x) × up x, clamped to a LIMIT, x a row per token.
    Otherwise weight × (down x), x a row per pair. Programs of GROUP row tiles run together over all
    columns: what they read is then still in the cache for the others. HALVE: an expert's last tile
    costs half, if it is at most half full."""
    pdl_wait()
    step = tl.cdiv(width, BLOCK_N // 2 if GATED else BLOCK_N) * GROUP
    program = tl.program_id(0)
    m = program // step * GROUP + program % GROUP
    if m >= tl.load(total):
        return
    order += m * BLOCK_M
    expert, n = tl.load(tiles + m), program % step // GROUP
    if HALVE and tl.load(order + BLOCK_M // 2) == pairs:
        half = tl.load(order + tl.arange(0, BLOCK_M // 2))
        _tile(
            x, x_row, weight, weights, out, half, half < pairs, expert, n, depth, width,
            TOP, SHARED, GATED, LIMIT, SWAP, BLOCK_M // 2, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip
    else:
        rows = tl.load(order + tl.arange(0, BLOCK_M))
        _tile(
            x, x_row, weight, weights, out, rows, rows < pairs, expert, n, depth, width,
            TOP, SHARED, GATED, LIMIT, SWAP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip


@kernel(do_not_specialize=["first", "held"])
def combine(
    x, ids, more, out, first, held, hidden,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [tokens, hidden] = the sum over a token's pairs, in their order, and of `more` [tokens,
    hidden] where it is given. Rows of pairs that another rank holds were never written, and are not
    read."""
    pdl_wait()
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP + SHARED):
        pair = token * (TOP + SHARED) + choice
        here = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED) >= 0
        at = x + pair.to(tl.int64) * hidden + column
        acc += tl.load(at, mask=here & (column < hidden), other=0).to(tl.float32)
    place = token.to(tl.int64) * hidden + column
    if more is not None:
        acc += tl.load(more + place, mask=column < hidden, other=0).to(tl.float32)
    to = out + place
    tl.store(to, acc.to(out.dtype.element_ty), mask=column < hidden)
