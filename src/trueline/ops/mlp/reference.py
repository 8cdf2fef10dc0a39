"""In float64."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trueline.ops.mlp import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["reference"]


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Tensor
    down: Tensor
    limit: float | None


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: object, limit: float | None = None
) -> Packed:
    return Packed(dense(gate_up).double(), dense(down).double(), limit)


def run(x: Tensor, packed: Packed, linear: object) -> Tensor:
    return down(middle(x, packed, linear), packed, linear).to(x.dtype)


def middle(x: Tensor, packed: Packed, linear: object) -> Tensor:
    gate, up = (x.double() @ packed.gate_up.T).chunk(2, dim=-1)
    return gated(gate, up, packed.limit)


def down(middle: Tensor, packed: Packed, linear: object) -> Tensor:
    return middle.double() @ packed.down.T


def gated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + (-gate).exp()) * up
