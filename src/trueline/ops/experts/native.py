"""One call a layer: tokens sorted by expert, both products and the weighted sum in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.native import refusals, weighted
from trueline.ops.mlp import native as mlp

__all__ = ["pack", "refusals", "run"]


def pack(gate_up: Tensor, down: Tensor, linear: Any) -> mlp.Packed:
    # Not in large pages, which take long to come: most of it lies idle in a step.
    return mlp.pack_all(gate_up, down, torch.empty)


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: mlp.Packed, linear: Any, first: int = 0
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    (n, top), hidden, experts = ids.shape, x.shape[1], len(packed.down)
    out = torch.empty(n, hidden)
    begin = torch.empty(experts + 1, dtype=torch.long)
    scratch = torch.empty(3, n * top, dtype=torch.long)
    slots, tokens, place = (row.data_ptr() for row in scratch)
    weighted("routed", packed.down.dtype)(
        *(x.data_ptr(), x.stride(0), ids.data_ptr(), weights.data_ptr()),
        *(packed.gate_up.data_ptr(), packed.down.data_ptr(), out.data_ptr()),
        *(n, top, hidden, packed.width, first, experts, begin.data_ptr(), slots, tokens, place),
    )
    return out
