"""Block fp8 on Hopper GPUs, activations quantised too (numerics `activations`): one grouped GEMM
for few rows of an expert and for many. Weights whose blocks it does not take are the portable
kernel's."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS, triton_quantised
from trueline.ops.experts.triton import SUM_BLOCK, sort_pairs
from trueline.ops.experts.triton_quantised import Packed, pack, pack_with_shared
from trueline.ops.fp8_launch import (
    TILE,
    Fp8Rows,
    Placed,
    combine,
    fits,
    gemm,
    quantised,
    through_fp8,
)
from trueline.ops.linear import LinearOp

__all__ = ["capabilities", "pack", "pack_with_shared", "run"]

capabilities = IMPLEMENTATIONS["hopper_fp8"]


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    powers = packed.gate_up.powers_of_two
    experts, shared = len(packed.down.numbers), packed.shared
    if not all(fits(each) and not each.columns % TILE for each in (packed.gate_up, packed.down)):
        how = triton_quantised.launch(len(x), ids.shape[1], experts - shared)
        through = partial(through_fp8, powers=powers)
        return triton_quantised.run_with(how, x, ids, weights, packed, first, through)
    placed = place(ids, experts, shared, first)
    product = partial(gemm, powers=powers, dtype=x.dtype, placed=placed)
    codes, scales = product(quantised(x, powers=powers, placed=placed), packed.gate_up, gated=True)
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
