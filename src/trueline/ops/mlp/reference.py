"""In float64."""

from __future__ import annotations

from torch import Tensor

from trueline.ops.mlp import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["reference"]


def pack(gate_up: Weight | Tensor, down: Weight | Tensor, linear: object) -> tuple[Tensor, Tensor]:
    return dense(gate_up).double(), dense(down).double()


def run(x: Tensor, packed: tuple[Tensor, Tensor], linear: object) -> Tensor:
    return down(middle(x, packed, linear), packed, linear).to(x.dtype)


def middle(x: Tensor, packed: tuple[Tensor, Tensor], linear: object) -> Tensor:
    gate, up = (x.double() @ packed[0].T).chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def down(middle: Tensor, packed: tuple[Tensor, Tensor], linear: object) -> Tensor:
    return middle.double() @ packed[1].T
