from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.capabilities import Opaque
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import IMPLEMENTATIONS
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["cpu"]


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Opaque
    down: Opaque
    limit: float | None


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    return Packed(linear.pack(gate_up), linear.pack(down), limit)


def run(x: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    return down(middle(x, packed, linear), packed, linear)


def middle(x: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    gate, up = linear.run(x, packed.gate_up).chunk(2, dim=-1)
    return invariant_math.swiglu(gate, up, packed.limit)


def down(middle: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    y: Tensor = linear.run(middle, packed.down)
    return y
