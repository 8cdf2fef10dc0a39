from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueline.device import large_empty
from trueline.native import library, panel, refusals

__all__ = ["pack", "refusals", "run"]


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Tensor
    down: Tensor
    width: int


def pack(gate_up: Tensor, down: Tensor, linear: Any) -> Packed:
    packed = pack_all(gate_up[None], down[None])
    return Packed(packed.gate_up[0], packed.down[0], packed.width)


def pack_all(gate_up: Tensor, down: Tensor) -> Packed:
    """Several, one after the other: [count, 2 width, hidden] and [count, hidden, width]."""
    gate_up, down = gate_up.contiguous(), down.contiguous()
    count, hidden, width = down.shape
    first = large_empty(count, -(-width // (panel() // 2)) * panel() * hidden)
    second = large_empty(count, -(-hidden // panel()) * panel() * width)
    for e in range(count):
        library().pack_gate_up(gate_up[e].data_ptr(), width, hidden, first[e].data_ptr())
        library().pack_weight(down[e].data_ptr(), hidden, width, second[e].data_ptr())
    return Packed(first, second, width)


def run(x: Tensor, packed: Packed, linear: Any) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape)
    library().gated(
        *(x.data_ptr(), x.stride(0), packed.gate_up.data_ptr(), packed.down.data_ptr()),
        *(out.data_ptr(), *x.shape, packed.width),
    )
    return out
