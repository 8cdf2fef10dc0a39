# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment
"""A handful of tokens through experts in block fp8, their activations quantised: as in few.py,
every pair streams its expert's rows by itself, and a program holds all of its codes in registers.
The kernel right before each of these has waited for the router: ids and weights are read before the
PDL wait, while that one runs. So the first quantises its own output for the second, a group at a
time: the last of a group's programs to finish does it.

Codes are loaded in chunks. A thread sums the products of a chunk, and multiplies that sum by the
scales of the group it is in; the columns of a program share a row of the weight's scales. Chunks
are the first dim of a tile: Triton gives neighbours to neighbouring threads."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.experts.pairs import expert_of, weight_of
from trueline.ops.fp8 import scales_of
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import swiglu

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


@triton.jit
def quantise_group(x, out, scale_at, POWERS: tl.constexpr, GROUP: tl.constexpr):
    column = tl.arange(0, GROUP)[None, :]
    value = tl.load(x + column)
    scale = scales_of(value, POWERS)
    codes = tl.div_rn(value, tl.broadcast_to(scale[:, None], (1, GROUP)))
    tl.store(out + column, codes.to(out.dtype.element_ty))
    tl.store(scale_at + tl.arange(0, 1), scale)


@kernel(do_not_specialize=["x_row", "out_row", "first", "held"])
def gated(
    x, of_x, x_row, ids, gate_up, of_weight, middle, arrived, out, of_out, out_row, first, held,
    hidden, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, LIMIT: tl.constexpr, POWERS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = silu(gate x) × up x in fp8, zeros for an expert held elsewhere; a
    program has BLOCK_N columns of one pair. x: codes [tokens, hidden], scales
    [hidden / GROUP, x_row]. Scales of out are [width / GROUP, out_row], powers of two if POWERS;
    those of the weights [experts, 2 width / GROUP, hidden / GROUP]. middle: float32
    [pairs, width]; arrived: a zero for each group of a pair, and zero again at the end."""
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
    both = tl.join(chunk_sums(gate, value, scale * of_gate), chunk_sums(up, value, scale * of_up))
    g, u = tl.split(tl.sum(both, axis=0))
    to = middle + pair * width + column + tl.arange(0, BLOCK_N)
    tl.store(to, swiglu(g, u, LIMIT))
    tl.debug_barrier()  # all threads have stored
    group = column // GROUP
    arrived += pair * (width // GROUP) + group
    if tl.atomic_add(arrived, 1, sem="acq_rel") == GROUP // BLOCK_N - 1:
        begin = pair * width + group * GROUP
        scale_at = of_out + group * out_row + pair
        quantise_group(middle + begin, out + begin, scale_at, POWERS, GROUP)
        tl.store(arrived, 0)


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
