"""In float64."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trueline.weights.value import Weight, dense


def pack(gate_up: Weight | Tensor, down: Weight | Tensor, linear: Any) -> tuple[Tensor, Tensor]:
    return dense(gate_up).double(), dense(down).double()


def run(x: Tensor, packed: tuple[Tensor, Tensor], linear: Any) -> Tensor:
    return down(middle(x, packed, linear), packed, linear).to(x.dtype)


def middle(x: Tensor, packed: tuple[Tensor, Tensor], linear: Any) -> Tensor:
    gate, up = (x.double() @ packed[0].T).chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def down(middle: Tensor, packed: tuple[Tensor, Tensor], linear: Any) -> Tensor:
    return middle.double() @ packed[1].T
