"""One call a layer: tokens sorted by expert, both GEMMs and the weighted sum in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.native import library, scaled, weighted
from trueline.ops.experts import IMPLEMENTATIONS
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import native as mlp
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["native"]


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> mlp.Packed:
    # Not in large pages, which take long to come: most of it lies idle in a step.
    if stored := scaled.as_stored(gate_up, down):
        first, second = (list(weight.unstack()) for weight in stored)
        return mlp.clamped(mlp.pack_stored(first, second, torch.empty), limit)
    return mlp.clamped(mlp.pack_dense(dense(gate_up), dense(down), torch.empty), limit)


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: mlp.Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    out = torch.empty(x.shape)
    sizes, scratch = _sizes(x, ids, packed, first), _scratch(ids, packed)
    weighted("routed", packed.down.dtype)(
        *(x.data_ptr(), x.stride(0), ids.data_ptr(), weights.data_ptr()),
        *(packed.gate_up.data_ptr(), packed.down.data_ptr(), out.data_ptr(), *sizes),
        *(part.data_ptr() for part in scratch),
    )
    return out


def middle(x: Tensor, ids: Tensor, packed: mlp.Packed, linear: LinearOp, first: int = 0) -> Tensor:
    x, ids = x if x.stride(1) == 1 else x.contiguous(), ids.contiguous()
    out = torch.zeros(*ids.shape, packed.width)
    sizes, scratch = _sizes(x, ids, packed, first), _scratch(ids, packed)
    weighted("routed_middle", packed.gate_up.dtype)(
        *(x.data_ptr(), x.stride(0), ids.data_ptr(), packed.gate_up.data_ptr(), out.data_ptr()),
        *(*sizes, *(part.data_ptr() for part in scratch)),
    )
    return out


def down(
    middle: Tensor, ids: Tensor, packed: mlp.Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    middle, ids = middle.contiguous(), ids.contiguous()
    assert middle.shape[2] == packed.inner, "the whole width, as down has it"
    out = torch.zeros(*ids.shape, packed.rows)
    begin, pairs, _ = _scratch(ids, packed)
    weighted("routed_down", packed.down.dtype)(
        *(middle.data_ptr(), ids.data_ptr(), packed.down.data_ptr(), out.data_ptr()),
        *(*ids.shape, packed.inner, packed.rows, first, len(packed.down)),
        *(begin.data_ptr(), pairs.data_ptr()),
    )
    return out


def combine(each: Tensor, weights: Tensor) -> Tensor:
    each, weights = each.contiguous(), weights.contiguous()
    n, top, hidden = each.shape
    out = torch.empty(n, hidden)
    library().combine(each.data_ptr(), weights.data_ptr(), out.data_ptr(), n, top, hidden)
    return out


def _sizes(x: Tensor, ids: Tensor, packed: mlp.Packed, first: int) -> tuple[float, ...]:
    """And the limit."""
    return (*ids.shape, x.shape[1], packed.width, first, len(packed.down), packed.limit)


def _scratch(ids: Tensor, packed: mlp.Packed) -> tuple[Tensor, ...]:
    """Where each expert's tokens begin; which token and which of its places each has."""
    begin = torch.empty(len(packed.down) + 1, dtype=torch.long)
    return begin, *torch.empty(2, ids.numel(), dtype=torch.long)
