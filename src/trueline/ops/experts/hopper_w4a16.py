"""int4 and fp4 on Hopper GPUs, activations in bfloat16 (W4A16). Weights are packed as the tensor
cores' threads want them (fragments.py), and dequantised in registers; each expert's are read once
for a tile of pairs. Weights whose scales are not for whole blocks of columns are
triton_quantised.py's."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS, kernels, triton_quantised
from trueline.ops.experts.fragments import STEP, Fragments, fragments_of
from trueline.ops.experts.triton import SUM_BLOCK, sort_pairs
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["hopper_w4a16"]

LEAST_ROWS, MOST_ROWS = 8, 16
# Of a program that streams: steps of 256 columns that make up for its start; and programs that
# there should be all the same.
LONG_STREAM, MANY_PROGRAMS = 28, 2048


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Fragments
    down: Fragments

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def launch(tokens: int, top: int, experts: int) -> int:
    """Pairs of one expert in a tile: one tile for nearly every expert."""
    mean = tokens * top / max(experts, 1)
    return min(max(power_of_two(int(mean + 1.5 * mean**0.5) + 1), LEAST_ROWS), MOST_ROWS)


def streamed(columns: int, steps: int, tiles: int) -> int:
    """Tiles of an expert's rows that a program streams."""
    return max(min(LONG_STREAM // steps, tiles * columns // MANY_PROGRAMS, columns), 1)


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp
) -> Packed | triton_quantised.Packed:
    assert isinstance(gate_up, Weight), "the plan chose it for a quantised format"
    assert isinstance(down, Weight), "the plan chose it for a quantised format"
    first, second = fragments_of(gate_up, gated=True), fragments_of(down, gated=False)
    if first is None or second is None:
        return triton_quantised.pack(gate_up, down, linear)
    return Packed(first, second)


def run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Packed | triton_quantised.Packed,
    linear: LinearOp,
    first: int = 0,
) -> Tensor:
    if isinstance(packed, triton_quantised.Packed):
        return triton_quantised.run(x, ids, weights, packed, linear, first)
    rows = launch(len(x), ids.shape[1], len(packed.down.words))
    return run_with(rows, x, ids, weights, packed, first)


def run_with(
    rows: int, x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, first: int = 0
) -> Tensor:
    x, ids, weights = unit_stride(x), ids.contiguous(), weights.contiguous()
    hidden, width, top = x.shape[1], packed.down.columns, ids.shape[1]
    experts, pairs = len(packed.down.words), ids.numel()
    order = sort_pairs(ids, experts, pairs, (first, experts), {"TOP": top, "SHARED": 0}, rows)
    middle, parts = x.new_empty(pairs, width), x.new_empty(pairs, hidden)
    _product(x, packed.gate_up, weights, middle, order, top, rows, gated=True)
    _product(middle, packed.down, weights, parts, order, top, rows, gated=False)
    out = x.new_empty(len(x), hidden)
    kernels.combine[(len(x), triton.cdiv(hidden, SUM_BLOCK))](
        *(parts, ids, out, first, experts, hidden), TOP=top, SHARED=0, BLOCK=SUM_BLOCK
    )
    return out


def _product(
    x: Tensor,
    weight: Fragments,
    weights: Tensor,
    out: Tensor,
    order: tuple[Tensor, Tensor, Tensor],
    top: int,
    rows: int,
    *,
    gated: bool,
) -> None:
    from trueline.ops.experts.w4a16_stream import stream  # Gluon is not everywhere

    pairs, width = out.shape
    columns = weight.words.shape[1]
    each = 1 if weight.tail else streamed(columns, weight.columns // STEP, len(order[1]))
    stream[(triton.cdiv(columns, each), len(order[1]))](
        *(x, x.stride(0), weight.words, weight.scales, *order, weights, out),
        *(pairs, weight.columns, width, each, columns),
        TOP=top, T=rows, GATED=gated, FORM=weight.form, GROUP=weight.group,
        STEPS=weight.columns >= STEP, TAIL=weight.tail,
    )  # fmt: skip
