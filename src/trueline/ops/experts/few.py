# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment
"""A handful of tokens: nothing is sorted, every pair streams its expert's rows by itself. Where all
weights of a program fit into registers they are loaded together; those of shared experts, which
depend on no earlier kernel, before the PDL wait. Longer rows are loaded STAGES ahead through shared
memory: registers would hold too few bytes in flight."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.experts.pairs import expert_of, weight_of
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import swiglu


@triton.jit
def rows_of(matrix, expert, rows, inner, count, depth, inside):
    """[rows, inner] of an expert's matrix of `count` rows."""
    at = matrix + expert.to(tl.int64) * count * depth
    return tl.load(at + rows[:, None] * depth + inner[None, :], mask=inside, other=0)


@kernel(do_not_specialize=["first", "held", "tokens"])
def gated(
    x, x_row, ids, gate_up, out, first, held, tokens, hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = silu(gate x) × up x; a program has BLOCK_N columns of one pair. Pairs of
    shared experts come first: their weights do not wait for the router."""
    number = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inside = (inner < hidden)[None, :]
    # Columns beyond the last read the last again, and nothing is stored.
    rows = tl.minimum(columns, width - 1)
    EACH: tl.constexpr = SHARED if SHARED > 0 else 1
    ROUTED: tl.constexpr = TOP if TOP > 0 else 1
    if number < tokens * SHARED:
        expert = held + number % EACH
        pair = number // EACH * (TOP + SHARED) + TOP + number % EACH
        gate = rows_of(gate_up, expert, rows, inner, 2 * width, hidden, inside)
        up = rows_of(gate_up, expert, width + rows, inner, 2 * width, hidden, inside)
        pdl_wait()
    else:
        number -= tokens * SHARED
        pair = number // ROUTED * (TOP + SHARED) + number % ROUTED
        pdl_wait()
        expert = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED)
        inside = inside & (expert >= 0)
        gate = rows_of(gate_up, tl.maximum(expert, 0), rows, inner, 2 * width, hidden, inside)
        up = rows_of(gate_up, tl.maximum(expert, 0), width + rows, inner, 2 * width, hidden, inside)
    given = x + (pair // (TOP + SHARED)).to(tl.int64) * x_row + inner
    value = tl.load(given, mask=inner < hidden, other=0).to(tl.float32)[None, :]
    g = tl.sum(gate.to(tl.float32) * value, axis=1)
    u = tl.sum(up.to(tl.float32) * value, axis=1)
    y = swiglu(g, u, LIMIT)
    here = (columns < width) & (expert >= 0)
    tl.store(out + pair.to(tl.int64) * width + columns, y.to(out.dtype.element_ty), here)


@kernel(do_not_specialize=["first", "held"])
def down(
    x, ids, weights, matrix, out, first, held, hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out [tokens, hidden] = Σ weight × (down x) over a token's pairs, in their order; x has a row
    a pair. A program has BLOCK_N columns of one token."""
    pdl_wait()
    token = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    matrix += tl.minimum(columns, hidden - 1)[:, None] * width + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    chunks = tl.cdiv(width, BLOCK_K)
    # One loop over all pairs, so that the next expert's rows are loaded before this one ends.
    for i in tl.range(0, (TOP + SHARED) * chunks, num_stages=STAGES):
        pair, k = token * (TOP + SHARED) + i // chunks, (i % chunks) * BLOCK_K
        expert = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED)
        inside = (inner < width - k) & (expert >= 0)
        scale = weight_of(weights, pair, expert >= 0, TOP, SHARED)
        value = tl.load(x + pair.to(tl.int64) * width + k + inner, mask=inside, other=0)
        at = matrix + tl.maximum(expert, 0).to(tl.int64) * (hidden * width) + k
        row = tl.load(at, mask=inside[None, :], other=0).to(tl.float32)
        total += row * (value.to(tl.float32) * scale)[None, :]
    y = tl.sum(total, axis=1)
    tl.store(
        out + token.to(tl.int64) * hidden + columns, y.to(out.dtype.element_ty), columns < hidden
    )


@triton.jit
def times(tile, x, weights, pair, inner, width, held, TOP: tl.constexpr, SHARED: tl.constexpr):
    """[rows]: a pair's weight times its rows times x, which is not there for one held elsewhere."""
    given = tl.load(x + pair.to(tl.int64) * width + inner, mask=(inner < width) & held, other=0)
    scale = weight_of(weights, pair, held, TOP, SHARED)
    return tl.sum(tile.to(tl.float32) * given.to(tl.float32)[None, :], axis=1) * scale


@kernel(do_not_specialize=["first", "held"])
def down_at_once(
    x, ids, weights, matrix, out, first, held, hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same where experts are narrow: `gated` comes right before, and has waited for the ids,
    so they may be read while it runs."""
    token = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    rows = tl.minimum(columns, hidden - 1)
    base = token * (TOP + SHARED)
    tiles = ()
    experts = ()
    for choice in tl.static_range(TOP + SHARED):
        expert = expert_of(ids, base + choice, token >= 0, first, held, TOP, SHARED)
        inside = ((inner < width) & (expert >= 0))[None, :]
        tile = rows_of(matrix, tl.maximum(expert, 0), rows, inner, hidden, width, inside)
        tiles = tiles + (tile,)  # noqa: RUF005 (Triton knows no stars)
        experts = experts + (expert,)  # noqa: RUF005
    pdl_wait()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(TOP + SHARED):
        here = experts[choice] >= 0
        total += times(tiles[choice], x, weights, base + choice, inner, width, here, TOP, SHARED)
    to = out + token.to(tl.int64) * hidden + columns
    tl.store(to, total.to(out.dtype.element_ty), columns < hidden)
