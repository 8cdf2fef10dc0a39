"""Block fp8 on Hopper GPUs, activations quantised too (numerics `activations`): what the gate lets
pass leaves the first GEMM in fp8. Gate and up are packed in whole blocks, whatever their width."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueline.ops.codes import Codes, codes_of
from trueline.ops.fp8_launch import TILE, Fp8Rows, arrivals, few, fits, gemm, quantised, takes_few
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import IMPLEMENTATIONS, triton
from trueline.spec.source import Span
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["hopper_fp8"]


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Codes
    down: Codes
    arrived: tuple[Tensor, Tensor]
    limit: float | None


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed | triton.Packed:
    assert isinstance(gate_up, Weight), "the plan chose it for a quantised format"
    assert isinstance(down, Weight), "the plan chose it for a quantised format"
    rows = gate_up.shape[0]
    halves = (Span(0, rows // 2, rows), Span(rows // 2, rows, rows))
    first = stacked([codes_of(gate_up.cut(0, half)) for half in halves])
    second = codes_of(down)
    if first is None or not (fits(first) and fits(second)):
        return triton.pack(gate_up, down, linear, limit)
    return Packed(first, second, (arrivals(first), arrivals(second)), limit)


def stacked(halves: list[Codes]) -> Codes | None:
    """Under each other, in whole blocks: zeros give zeros. None if their blocks are others."""
    if any((each.rows_per_scale, each.group) != (TILE, TILE) for each in halves):
        return None
    rows = halves[0].numbers.shape[1]
    added = (0, 0, 0, -rows % TILE)
    numbers = [torch.nn.functional.pad(each.numbers, added) for each in halves]
    scales = [each.scales for each in halves]
    return replace(halves[0], numbers=torch.cat(numbers, 1), scales=torch.cat(scales, 1))


def run(x: Tensor, packed: Packed | triton.Packed, linear: LinearOp) -> Tensor:
    if isinstance(packed, triton.Packed):
        return triton.run(x, packed, linear)
    powers, limit = packed.gate_up.powers_of_two, packed.limit
    if takes_few(len(x), packed.gate_up):
        both = few(x, packed.gate_up, packed.arrived[0], torch.float32)
        middle = quantised(both, powers=powers, gated=True, limit=limit)
        return few(middle, packed.down, packed.arrived[1], x.dtype)
    rows = quantised(x, powers=powers)
    first = gemm(rows, packed.gate_up, gated=True, limit=limit, powers=powers, dtype=x.dtype)
    middle = Fp8Rows(*first, len(x))
    return gemm(middle, packed.down, gated=False, powers=powers, dtype=x.dtype)[0][: len(x)]
