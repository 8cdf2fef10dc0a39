"""Block fp8 on Hopper GPUs, activations quantised too (numerics `activations`): a few rows of each
expert stream its weights through registers, more are a grouped GEMM. Weights whose blocks these do
not take are the portable kernel's."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS, triton_quantised
from trueline.ops.experts.triton import SUM_BLOCK, sort_pairs, sum_pairs
from trueline.ops.experts.triton_quantised import Packed, pack, pack_with_shared
from trueline.ops.fp8_launch import (
    TILE,
    Fp8Rows,
    Placed,
    combine,
    fits,
    gemm,
    quantised,
    stream,
    through_fp8,
)
from trueline.ops.linear import LinearOp

__all__ = ["capabilities", "pack", "pack_with_shared", "run"]

capabilities = IMPLEMENTATIONS["hopper_fp8"]

STREAMED = 8
"""Pairs of one expert that are streamed together."""
MOST_STREAMED = 3
"""Pairs of an expert, on average."""


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    powers = packed.gate_up.powers_of_two
    experts, shared = len(packed.down.numbers), packed.shared
    if not all(fits(each) and not each.columns % TILE for each in (packed.gate_up, packed.down)):
        how = triton_quantised.launch(len(x), ids.shape[1], experts - shared)
        through = partial(through_fp8, powers=powers)
        return triton_quantised.run_with(how, x, ids, weights, packed, first, through)
    weights = weights.contiguous()
    rows = launch(len(x), ids.shape[1], experts - shared)
    placed = place(ids, experts, shared, first, rows)
    out = x.new_empty(len(x), x.shape[1])
    if rows < TILE:
        codes = quantised(x, powers=powers, dtype=x.dtype)
        step = partial(stream, weights=weights, placed=placed, rows=rows)
        middle = step(codes, packed.gate_up, gated=True, dtype=torch.float32)
        codes = quantised(middle, powers=powers, dtype=x.dtype)
        parts = step(codes, packed.down, gated=False, dtype=x.dtype)
        sum_pairs(parts, placed.ids, placed.held, placed.choices, out)
        return out
    product = partial(gemm, powers=powers, dtype=x.dtype, placed=placed)
    numbers, scales = product(
        quantised(x, powers=powers, placed=placed), packed.gate_up, gated=True
    )
    parts, _ = product(Fp8Rows(numbers, scales, len(numbers)), packed.down, gated=False)
    combine(parts, weights, placed, out, SUM_BLOCK)
    return out


def launch(tokens: int, top: int, experts: int) -> int:
    """Rows of a tile, as measured on an H200."""
    mean = tokens * top / max(experts, 1)
    return STREAMED if mean <= MOST_STREAMED else TILE


def place(ids: Tensor, experts: int, shared: int, first: int, rows: int) -> Placed:
    ids = ids.contiguous()
    top, held = ids.shape[1], (first, experts - shared)
    pairs = len(ids) * (top + shared)
    places = ids.new_empty(pairs, dtype=torch.int32)
    choices = {"TOP": top, "SHARED": shared}
    order, tiles, total = sort_pairs(ids, experts, pairs, held, choices, rows, places)
    return Placed(ids, order, tiles, total, places, held, top, shared)
