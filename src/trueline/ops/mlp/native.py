from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueline.device import large_empty
from trueline.native import packable, panel, refusals, weighted

__all__ = ["pack", "refusals", "run"]


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Tensor
    down: Tensor
    width: int


def pack(gate_up: Tensor, down: Tensor, linear: Any) -> Packed:
    packed = pack_all(gate_up[None], down[None], large_empty)
    return Packed(packed.gate_up[0], packed.down[0], packed.width)


def pack_all(gate_up: Tensor, down: Tensor, empty: Callable[..., Tensor]) -> Packed:
    """Several, one after the other: [count, 2 width, hidden] and [count, hidden, width], into
    memory that `empty` gives."""
    gate_up, down = packable(gate_up), packable(down)
    count, hidden, width = down.shape
    first = empty(count, -(-width // (panel() // 2)) * panel() * hidden, dtype=gate_up.dtype)
    second = empty(count, -(-hidden // panel()) * panel() * width, dtype=down.dtype)
    pack_pairs, pack_columns = (
        weighted(name, down.dtype) for name in ("pack_gate_up", "pack_weight")
    )
    for e in range(count):
        pack_pairs(gate_up[e].data_ptr(), width, hidden, first[e].data_ptr())
        pack_columns(down[e].data_ptr(), hidden, width, second[e].data_ptr())
    return Packed(first, second, width)


def run(x: Tensor, packed: Packed, linear: Any) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape)
    weighted("gated", packed.down.dtype)(
        *(x.data_ptr(), x.stride(0), packed.gate_up.data_ptr(), packed.down.data_ptr()),
        *(out.data_ptr(), *x.shape, packed.width),
    )
    return out
