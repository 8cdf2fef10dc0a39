"""One token, one expert at a time, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Packed = list[tuple[Tensor, Tensor]]


def pack(gate_up: Tensor, down: Tensor, linear: Any) -> Packed:
    return [(gate_up[e].double(), down[e].double()) for e in range(len(down))]


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: Any, first: int = 0
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if first <= expert < first + len(packed):
                gate_up, down = packed[expert - first]
                gate, up = (gate_up @ x[token].double()).chunk(2)
                out[token] += weight * (down @ (gate / (1 + (-gate).exp()) * up))
    return out.to(x.dtype)
