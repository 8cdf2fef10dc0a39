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
    between = middle(x, ids, packed, linear, first)
    return combine(down(between, ids, packed, linear, first), weights).to(x.dtype)


def middle(x: Tensor, ids: Tensor, packed: Packed, linear: object, first: int = 0) -> Tensor:
    out = torch.zeros(*ids.shape, len(packed[0][0]) // 2, dtype=torch.float64)
    for token in range(len(x)):
        for k, expert in enumerate(ids[token].tolist()):
            if first <= expert < first + len(packed):
                gate, up = (packed[expert - first][0] @ x[token].double()).chunk(2)
                out[token, k] = gate / (1 + (-gate).exp()) * up
    return out


def down(middle: Tensor, ids: Tensor, packed: Packed, linear: object, first: int = 0) -> Tensor:
    out = torch.zeros(*ids.shape, len(packed[0][1]), dtype=torch.float64)
    for token in range(len(ids)):
        for k, expert in enumerate(ids[token].tolist()):
            if first <= expert < first + len(packed):
                out[token, k] = packed[expert - first][1] @ middle[token, k].double()
    return out


def combine(each: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(each[:, 0], dtype=torch.float64)
    for k in range(each.shape[1]):
        out += weights[:, k, None].double() * each[:, k]
    return out
