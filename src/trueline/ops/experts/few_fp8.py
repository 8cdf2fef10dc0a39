# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment
"""A handful of tokens through experts in block fp8, their activations quantised: as in few.py,
every pair streams its expert's rows by itself, and a program holds all of its codes in registers.
The kernel right before each of these quantises its input and has waited for the router: ids and
weights are read before the PDL wait, while that one runs.

Codes are loaded in chunks. A thread sums the products of a chunk, and multiplies that sum by the
scales of the group it is in; the columns of a program share a row of the weight's scales. Chunks
are the first dim of a tile: Triton gives neighbours to neighbouring threads."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.experts.pairs import expert_of, weight_of
from trueline.ops.jit import kernel, pdl_wait

CHUNK = tl.constexpr(16)
"""Codes that a thread loads at once."""


@triton.jit
def codes_at(at, inside):
    """[chunks, columns, CHUNK], of where the first of each chunk is, [chunks, columns or 1, 1]."""
    return tl.load(at + tl.arange(0, CHUNK)[None, None, :], mask=inside[:, None, None], other=0.0)


@triton.jit
def chunk_sums(codes, x, scale):
    """[chunks, columns]; a scale for each chunk."""
    return tl.sum(codes.to(tl.float32) * x.to(tl.float32), axis=2) * scale[:, None]


@kernel(do_not_specialize=["x_row", "first", "held"])
def gated(
    x, of_x, x_row, ids, gate_up, of_weight, out, first, held, hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = silu(gate x) × up x, zeros for an expert held elsewhere; a program has
    BLOCK_N columns of one pair. x: codes [tokens, hidden], scales [hidden / GROUP, x_row]. Scales
    of the weights are [experts, 2 width / GROUP, hidden / GROUP]."""
    pair = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N
    inner = tl.arange(0, BLOCK_K // CHUNK) * CHUNK
    expert = expert_of(ids, pair, pair >= 0, first, held, TOP, SHARED)
    inside = (inner < hidden) & (expert >= 0)
    expert = tl.maximum(expert, 0)
    rows = column + tl.arange(0, BLOCK_N)[None, :, None]
    at = gate_up + expert.to(tl.int64) * (2 * width * hidden)
    at += rows * hidden + inner[:, None, None]
    gate, up = codes_at(at, inside), codes_at(at + width * hidden, inside)
    groups = hidden // GROUP
    scales = of_weight + (expert * (2 * width // GROUP) + column // GROUP) * groups + inner // GROUP
    of_gate = tl.load(scales, mask=inside, other=0.0)
    of_up = tl.load(scales + width // GROUP * groups, mask=inside, other=0.0)
    pdl_wait()
    token = pair // (TOP + SHARED)
    value = codes_at(x + token.to(tl.int64) * hidden + inner[:, None, None], inside)
    scale = tl.load(of_x + inner // GROUP * x_row + token, mask=inside, other=0.0)
    g = tl.sum(chunk_sums(gate, value, scale * of_gate), axis=0)
    u = tl.sum(chunk_sums(up, value, scale * of_up), axis=0)
    to = out + pair.to(tl.int64) * width + column + tl.arange(0, BLOCK_N)
    tl.store(to, g / (1 + tl.exp(-g)) * u)


@kernel(do_not_specialize=["x_row", "first", "held"])
def down(
    x, of_x, x_row, ids, weights, matrix, of_weight, out, first, held, hidden,
    WIDTH: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [tokens, hidden] = Σ weight × (down x) over a token's pairs; a program has BLOCK_N
    columns of one token, and loads BLOCK_K codes of each together, whichever pairs they are of.
    x: codes [pairs, WIDTH], scales [WIDTH / GROUP, x_row]. Scales of the weights are
    [experts, hidden / GROUP, WIDTH / GROUP]."""
    PAIRS: tl.constexpr = TOP + SHARED
    token = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N
    rows = column + tl.arange(0, BLOCK_N)[None, :, None]
    tiles = ()
    scales = ()
    for first_code in tl.static_range(0, PAIRS * WIDTH, BLOCK_K):
        place = first_code + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        pair, inner = token * PAIRS + place // WIDTH, place % WIDTH
        expert = expert_of(ids, pair, place < PAIRS * WIDTH, first, held, TOP, SHARED)
        inside = (place < PAIRS * WIDTH) & (expert >= 0)
        expert = tl.maximum(expert, 0)
        at = matrix + (expert.to(tl.int64) * (hidden * WIDTH) + inner)[:, None, None]
        row = (expert * (hidden // GROUP) + column // GROUP) * (WIDTH // GROUP)
        scale = tl.load(of_weight + row + inner // GROUP, mask=inside, other=0.0)
        tiles = tiles + (codes_at(at + rows * WIDTH, inside),)  # noqa: RUF005 (Triton knows no stars)
        scales = scales + (scale,)  # noqa: RUF005
    pdl_wait()
    total = tl.zeros((BLOCK_K // CHUNK, BLOCK_N), tl.float32)
    for first_code in tl.static_range(0, PAIRS * WIDTH, BLOCK_K):
        place = first_code + tl.arange(0, BLOCK_K // CHUNK) * CHUNK
        pair, inside = token * PAIRS + place // WIDTH, place < PAIRS * WIDTH
        value = codes_at(x + token.to(tl.int64) * (PAIRS * WIDTH) + place[:, None, None], inside)
        scale = tl.load(of_x + place % WIDTH // GROUP * x_row + pair, mask=inside, other=0.0)
        scale *= weight_of(weights, pair, inside, TOP, SHARED) * scales[first_code // BLOCK_K]
        total += chunk_sums(tiles[first_code // BLOCK_K], value, scale)
    to = out + token.to(tl.int64) * hidden + column + tl.arange(0, BLOCK_N)
    tl.store(to, tl.sum(total, axis=0).to(out.dtype.element_ty))
