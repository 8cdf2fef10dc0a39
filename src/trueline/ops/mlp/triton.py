"""Both products by `linear`, silu × up in a kernel between them. A single row streams the weights
as an expert's would be, and needs no third kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from trueline.ops.experts import triton as experts
from trueline.ops.launch import refusals
from trueline.ops.mlp import kernels
from trueline.weights.value import Weight

__all__ = ["pack", "refusals", "run"]

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Any
    down: Any
    stream: experts.Packed | None
    """The same weights where `linear` keeps them as they are: an expert that everyone takes."""


def pack(gate_up: Weight | Tensor, down: Weight | Tensor, linear: Any) -> Packed:
    first, second = linear.pack(gate_up), linear.pack(down)
    plain = isinstance(first, Tensor) and first.shape == gate_up.shape
    stream = experts.Packed(first[None], second[None], 1) if plain else None
    return Packed(first, second, stream)


def run(x: Tensor, packed: Packed, linear: Any) -> Tensor:
    if len(x) == 1 and packed.stream is not None:
        nobody = x.new_empty(1, 0)
        return experts.run(x, nobody, nobody, packed.stream, linear)
    both = linear.run(x, packed.gate_up).contiguous()
    middle = both.new_empty(len(both), both.shape[1] // 2)
    kernels.gate[(len(both), triton.cdiv(middle.shape[1], BLOCK))](
        both, middle, middle.shape[1], BLOCK=BLOCK
    )
    y: Tensor = linear.run(middle, packed.down)
    return y
