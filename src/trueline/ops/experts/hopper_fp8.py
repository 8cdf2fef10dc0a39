"""Block fp8 on Hopper GPUs, activations quantised too (numerics `activations`). Two ways, by the
number of tokens: a handful streams its experts pair by pair (fp8_stream.py), more are sorted by
expert for a grouped GEMM. Weights whose blocks these do not take are the portable kernel's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS, fp8_stream, triton_quantised
from trueline.ops.experts.triton import SUM_BLOCK, sort_pairs
from trueline.ops.fp8_launch import (
    CODES,
    TILE,
    Fp8Rows,
    Placed,
    combine,
    fits,
    gemm,
    quantised,
    room,
    through_fp8,
)
from trueline.ops.launch import power_of_two
from trueline.ops.linear import LinearOp
from trueline.weights.formats.block_fp8 import INPUT_GROUP as GROUP
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["hopper_fp8"]

STREAMED_PAIRS = 18
"""Pairs that are streamed one by one."""
WARP_CODES = 32 * fp8_stream.CHUNK.value
"""Of a row that a warp loads at once."""
MOST_WARPS = 4
THREAD_CODES = 384
"""Of all its rows that a thread can hold."""


@dataclass(frozen=True, slots=True)
class Packed:
    codes: triton_quantised.Packed
    arrived: Tensor
    """Zeros, one for each group of a pair that is streamed."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """How one of the two GEMMs is tiled where pairs are streamed one by one."""

    columns: int
    """Rows of the weight a program holds; of gate and of up, each."""
    inner: int
    """Codes of a row that are loaded together."""
    warps: int


@dataclass(frozen=True, slots=True)
class StreamLaunch:
    first: Streamed
    second: Streamed


def stream_launch(
    tokens: int, top: int, shared: int, hidden: int, width: int
) -> StreamLaunch | None:
    """None: tokens are too many, or rows too long for the registers of a program. Programs are
    small, so that some of a multiprocessor's load while others compute."""
    if tokens * (top + shared) > STREAMED_PAIRS:
        return None
    whole = power_of_two(hidden)
    warps = min(max(whole // WARP_CODES, 1), MOST_WARPS)
    # an output of the first needs a row of gate and one of up
    first = _columns(2 * whole, warps)
    inner = MOST_WARPS * WARP_CODES
    second = _columns(triton.cdiv((top + shared) * width, inner) * inner, MOST_WARPS)
    if not first or not second:
        return None
    return StreamLaunch(Streamed(first, whole, warps), Streamed(second, inner, MOST_WARPS))


def _columns(codes: int, warps: int) -> int:
    """Outputs that a program can hold the weights of: a power of two that divides a block's, or 0.
    `codes`: of one."""
    most = min(warps * 32 * THREAD_CODES // codes, TILE)
    return power_of_two(most // 2 + 1) if most else 0


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    return of_codes(triton_quantised.pack(gate_up, down, linear, limit))


def pack_with_shared(
    gate_up: Weight | Tensor,
    down: Weight | Tensor,
    shared_gate_up: Weight | Tensor,
    shared_down: Weight | Tensor,
    linear: LinearOp,
    limit: float | None = None,
) -> Packed:
    every = gate_up, down, shared_gate_up, shared_down
    return of_codes(triton_quantised.pack_with_shared(*every, linear, limit))


def of_codes(codes: triton_quantised.Packed) -> Packed:
    groups = triton.cdiv(codes.down.columns, GROUP)
    device = codes.down.numbers.device
    return Packed(codes, torch.zeros(STREAMED_PAIRS * groups, dtype=torch.int32, device=device))


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    codes = packed.codes
    if not all(fits(each) and not each.columns % TILE for each in (codes.gate_up, codes.down)):
        routed = len(codes.down.numbers) - codes.shared
        tiles = triton_quantised.launch(len(x), ids.shape[1], routed)
        through = partial(through_fp8, powers=codes.gate_up.powers_of_two)
        return triton_quantised.run_with(tiles, x, ids, weights, codes, first, through)
    how = stream_launch(len(x), ids.shape[1], codes.shared, *codes.down.numbers.shape[1:])
    if how is not None:
        return run_streamed(how, x, ids, weights, packed, first)
    return run_grouped(x, ids, weights, codes, first)


def run_streamed(
    how: StreamLaunch, x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, first: int = 0
) -> Tensor:
    gate_up, down, shared = packed.codes.gate_up, packed.codes.down, packed.codes.shared
    ids, weights, powers = ids.contiguous(), weights.contiguous(), gate_up.powers_of_two
    experts, hidden, width = down.numbers.shape
    pairs = len(x) * (ids.shape[1] + shared)
    held = first, experts - shared
    choices = {"TOP": ids.shape[1], "SHARED": shared, "GROUP": GROUP}
    middle = room(pairs, width, x)
    out = x.new_empty(len(x), hidden)
    rows = quantised(x, powers=powers)
    fp8_stream.gated[(width // how.first.columns, pairs)](
        *(rows.codes, rows.scales, rows.scales.shape[1], ids),
        *(gate_up.numbers.view(CODES), gate_up.scales),
        *(x.new_empty(pairs, width, dtype=torch.float32), packed.arrived),
        *(middle.codes, middle.scales, middle.scales.shape[1], *held, hidden, width),
        **choices, LIMIT=packed.codes.limit, POWERS=powers,
        BLOCK_N=how.first.columns, BLOCK_K=how.first.inner, num_warps=how.first.warps,
    )  # fmt: skip
    fp8_stream.down[(hidden // how.second.columns, len(x))](
        *(middle.codes, middle.scales, middle.scales.shape[1], ids, weights),
        *(down.numbers.view(CODES), down.scales, out, *held, hidden),
        WIDTH=width, **choices,
        BLOCK_N=how.second.columns, BLOCK_K=how.second.inner, num_warps=how.second.warps,
    )  # fmt: skip
    return out


def run_grouped(
    x: Tensor, ids: Tensor, weights: Tensor, packed: triton_quantised.Packed, first: int = 0
) -> Tensor:
    powers = packed.gate_up.powers_of_two
    placed = place(ids, len(packed.down.numbers), packed.shared, first)
    product = partial(gemm, powers=powers, dtype=x.dtype, placed=placed)
    rows = quantised(x, powers=powers, placed=placed)
    codes, scales = product(rows, packed.gate_up, gated=True, limit=packed.limit)
    parts, _ = product(Fp8Rows(codes, scales, len(codes)), packed.down, gated=False)
    out = x.new_empty(len(x), x.shape[1])
    combine(parts, weights.contiguous(), placed, out, SUM_BLOCK)
    return out


def place(ids: Tensor, experts: int, shared: int, first: int) -> Placed:
    ids = ids.contiguous()
    top, held = ids.shape[1], (first, experts - shared)
    pairs = len(ids) * (top + shared)
    places = ids.new_empty(pairs, dtype=torch.int32)
    choices = {"TOP": top, "SHARED": shared}
    order, tiles, total = sort_pairs(ids, experts, pairs, held, choices, TILE, places)
    return Placed(ids, order, tiles, total, places, held, top, shared)
