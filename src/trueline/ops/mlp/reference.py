"""In float64."""

from __future__ import annotations

from torch import Tensor

from trueline.ops.mlp import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["reference"]


def pack(gate_up: Tensor, down: Tensor, linear: object) -> tuple[Tensor, Tensor]:
    return gate_up.double(), down.double()


def run(x: Tensor, packed: tuple[Tensor, Tensor], linear: object) -> Tensor:
    return down(middle(x, packed, linear), packed, linear).to(x.dtype)


def middle(x: Tensor, packed: tuple[Tensor, Tensor], linear: object) -> Tensor:
    gate, up = (x.double() @ packed[0].T).chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def down(middle: Tensor, packed: tuple[Tensor, Tensor], linear: object) -> Tensor:
    return middle.double() @ packed[1].T
