"""Both GEMMs by `linear`, silu × up in a kernel between them. A single row streams the weights
as an expert's would be, and needs no third kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from trueline.ops.capabilities import Opaque
from trueline.ops.experts import triton as experts
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import IMPLEMENTATIONS, kernels
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["triton"]

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Opaque
    down: Opaque
    limit: float | None
    stream: experts.Packed | None
    """The same weights where `linear` keeps them as they are: an expert that everyone takes."""


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    first, second = linear.pack(gate_up), linear.pack(down)
    stream = None
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == gate_up.shape:
        stream = experts.Packed(first[None], second[None], 1, limit)
    return Packed(first, second, limit, stream)


def run(x: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    if len(x) == 1 and packed.stream is not None:
        nobody = x.new_empty(1, 0)
        return experts.run(x, nobody, nobody, packed.stream, linear)
    both = linear.run(x, packed.gate_up).contiguous()
    middle = both.new_empty(len(both), both.shape[1] // 2)
    kernels.gate[(len(both), triton.cdiv(middle.shape[1], BLOCK))](
        both, middle, middle.shape[1], LIMIT=packed.limit, BLOCK=BLOCK
    )
    y: Tensor = linear.run(middle, packed.down)
    return y
