# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A handful of tokens: nothing is sorted, every pair streams its expert's rows by itself. Loads run
STAGES ahead, through shared memory: registers alone hold too few bytes in flight."""

from __future__ import annotations

import triton.language as tl

from trueline.ops.experts.pairs import expert_of, weight_of
from trueline.ops.kernel import kernel, wait_turn


@kernel(do_not_specialize=["first", "held"])
def gated(
    x, x_row, ids, gate_up, out, first, held, hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = silu(gate x) × up x; a program has BLOCK_N columns of one pair."""
    wait_turn()
    pair = tl.program_id(0)
    expert = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED)
    if expert < 0:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Columns beyond the last read the last again: no mask in the loop, and nothing is stored.
    rows = tl.minimum(columns, width - 1)
    gate_at = gate_up + expert.to(tl.int64) * (2 * width * hidden)
    gate_at += rows[:, None] * hidden + inner[None, :]
    up_at = gate_at + width * hidden
    x_at = x + (pair // (TOP + SHARED)).to(tl.int64) * x_row + inner
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
        inside = inner < hidden - k
        value = tl.load(x_at + k, mask=inside, other=0).to(tl.float32)[None, :]
        gate += tl.load(gate_at + k, mask=inside[None, :], other=0).to(tl.float32) * value
        up += tl.load(up_at + k, mask=inside[None, :], other=0).to(tl.float32) * value
    g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    y = g / (1 + tl.exp(-g)) * u
    tl.store(out + pair.to(tl.int64) * width + columns, y.to(out.dtype.element_ty), columns < width)


@kernel(do_not_specialize=["first", "held"])
def down(
    x, ids, weights, matrix, out, first, held, hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out [tokens, hidden] = Σ weight × (down x) over a token's pairs, in their order; x has a row
    a pair. A program has BLOCK_N columns of one token."""
    wait_turn()
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    matrix += tl.minimum(columns, hidden - 1)[:, None] * width + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    chunks = tl.cdiv(width, BLOCK_K)
    # One loop over all pairs, so that the next expert's rows are on their way before this one ends.
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
