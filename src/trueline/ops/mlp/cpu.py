from __future__ import annotations

from typing import Any

from torch import Tensor

from trueline.ops import steady
from trueline.weights.value import Weight


def pack(gate_up: Weight | Tensor, down: Weight | Tensor, linear: Any) -> tuple[Any, Any]:
    return linear.pack(gate_up), linear.pack(down)


def run(x: Tensor, packed: tuple[Any, Any], linear: Any) -> Tensor:
    return down(middle(x, packed, linear), packed, linear)


def middle(x: Tensor, packed: tuple[Any, Any], linear: Any) -> Tensor:
    gate, up = linear.run(x, packed[0]).chunk(2, dim=-1)
    y: Tensor = steady.silu(gate) * up
    return y


def down(middle: Tensor, packed: tuple[Any, Any], linear: Any) -> Tensor:
    y: Tensor = linear.run(middle, packed[1])
    return y
