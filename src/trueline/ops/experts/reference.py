"""One token, one expert at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["reference"]

Packed = list[tuple[Tensor, Tensor]]


def pack(gate_up: Weight | Tensor, down: Weight | Tensor, linear: object) -> Packed:
    pairs = zip(dense(gate_up), dense(down), strict=True)
    return [(first.double(), second.double()) for first, second in pairs]


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: object, first: int = 0
) -> Tensor:
    return combine(each(x, ids, packed, linear, first), weights).to(x.dtype)


def each(x: Tensor, ids: Tensor, packed: Packed, linear: object, first: int = 0) -> Tensor:
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for token in range(len(x)):
        for k, expert in enumerate(ids[token].tolist()):
            if first <= expert < first + len(packed):
                gate_up, down = packed[expert - first]
                gate, up = (gate_up @ x[token].double()).chunk(2)
                out[token, k] = down @ (gate / (1 + (-gate).exp()) * up)
    return out


def combine(each: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(each[:, 0], dtype=torch.float64)
    for k in range(each.shape[1]):
        out += weights[:, k, None].double() * each[:, k]
    return out
