"""Weights as they are stored, for any GPU: pairs sorted by expert, codes dequantised in the
kernel's registers. Fewer bytes than dequantised weights have; the products are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import triton
from torch import Tensor

from trueline.ops.codes import Codes, codes_of
from trueline.ops.experts import IMPLEMENTATIONS, quantised_kernels
from trueline.ops.experts.shared import with_shared
from trueline.ops.experts.triton import More, sort_pairs, sum_pairs
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["triton_quantised"]

MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Codes
    down: Codes
    shared: int
    """Of the experts, those at the end that every token takes with weight 1."""
    limit: float | None

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    """Pairs of one expert."""
    columns: int = 64
    """Rows of the weight; for gate and up together."""
    inner: int = 64
    """Bytes of a row that are loaded together."""
    warps: int = 4
    stages: int = 3


def launch(tokens: int, top: int, experts: int) -> Tiles:
    """One tile for nearly every expert, so that its weights are read once."""
    mean = tokens * top / max(experts, 1)
    return Tiles(min(max(power_of_two(int(mean + 1.5 * mean**0.5) + 1), 16), MOST_ROWS))


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    assert isinstance(gate_up, Weight), "the plan chose it for a quantised format"
    assert isinstance(down, Weight), "the plan chose it for a quantised format"
    return Packed(codes_of(gate_up), codes_of(down), 0, limit)


def pack_with_shared(
    gate_up: Weight | Tensor,
    down: Weight | Tensor,
    shared_gate_up: Weight | Tensor,
    shared_down: Weight | Tensor,
    linear: LinearOp,
    limit: float | None = None,
) -> Packed:
    routed, shared = (gate_up, down), (shared_gate_up, shared_down)
    every = [each for each in (*routed, *shared) if isinstance(each, Weight)]
    assert len(every) == len(routed) + len(shared), "the plan chose it for a quantised format"
    gate_up, down, count = with_shared(*every)
    return Packed(codes_of(gate_up), codes_of(down), count, limit)


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    return run_with(_launched(x, ids, packed), x, ids, weights, packed, first)


def run_added(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    more: More,
    packed: Packed,
    linear: LinearOp,
    first: int = 0,
) -> Tensor:
    how = _launched(x, ids, packed)
    return run_with(how, x, ids, weights, packed, first, more=more)


def _launched(x: Tensor, ids: Tensor, packed: Packed) -> Tiles:
    return launch(len(x), ids.shape[1], len(packed.down.numbers) - packed.shared)


def run_with(
    how: Tiles,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Packed,
    first: int = 0,
    through: Callable[[Tensor], Tensor] = unit_stride,
    more: More | None = None,
) -> Tensor:
    """`through`: what activations go through before each of the two GEMMs."""
    dtype, x, ids, weights = x.dtype, through(x), ids.contiguous(), weights.contiguous()
    hidden, width, top = x.shape[1], packed.down.columns, ids.shape[1]
    experts, choices = len(packed.down.numbers), {"TOP": top, "SHARED": packed.shared}
    pairs, held = len(x) * (top + packed.shared), (first, experts - packed.shared)
    order = sort_pairs(ids, experts, pairs, held, choices, how.rows)
    added = None if more is None else more()
    middle, parts = x.new_empty(pairs, width), x.new_empty(pairs, hidden)
    product = partial(_product, weights=weights, order=order, choices=choices, how=how)
    product(x, packed.gate_up, middle, gated=True, limit=packed.limit)
    product(through(middle), packed.down, parts, gated=False, limit=None)
    out = x.new_empty(len(x), hidden, dtype=dtype)
    sum_pairs(parts, ids, held, choices, out, added)
    return out


def _product(
    x: Tensor,
    codes: Codes,
    out: Tensor,
    *,
    weights: Tensor,
    order: tuple[Tensor, Tensor, Tensor],
    choices: dict[str, int],
    how: Tiles,
    gated: bool,
    limit: float | None,
) -> None:
    pairs, width = out.shape
    columns = triton.cdiv(width, how.columns // 2 if gated else how.columns)
    quantised_kernels.grouped[(len(order[1]) * columns,)](
        *(x, x.stride(0), codes.numbers, codes.numbers.shape[2]),
        *(codes.scales, codes.scales.shape[2], codes.scales.shape[1]),
        *(weights, out, *order, pairs, codes.columns, width),
        **choices, GATED=gated, LIMIT=limit, SWAP=how.rows < 64, FORM=codes.form,
        ROWS=codes.rows_per_scale, GROUP=codes.group, BLOCK_M=how.rows, BLOCK_N=how.columns,
        BLOCK_K=how.inner, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
