from __future__ import annotations

from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.capabilities import Opaque
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import IMPLEMENTATIONS
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["cpu"]


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp
) -> tuple[Opaque, Opaque]:
    return linear.pack(gate_up), linear.pack(down)


def run(x: Tensor, packed: tuple[Opaque, Opaque], linear: LinearOp) -> Tensor:
    return down(middle(x, packed, linear), packed, linear)


def middle(x: Tensor, packed: tuple[Opaque, Opaque], linear: LinearOp) -> Tensor:
    gate, up = linear.run(x, packed[0]).chunk(2, dim=-1)
    y: Tensor = invariant_math.silu(gate) * up
    return y


def down(middle: Tensor, packed: tuple[Opaque, Opaque], linear: LinearOp) -> Tensor:
    y: Tensor = linear.run(middle, packed[1])
    return y
