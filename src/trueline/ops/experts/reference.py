"""One token, one expert at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS
from trueline.ops.mlp.reference import gated
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["reference"]


@dataclass(frozen=True, slots=True)
class Packed:
    experts: list[tuple[Tensor, Tensor]]
    limit: float | None


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: object, limit: float | None = None
) -> Packed:
    pairs = zip(dense(gate_up), dense(down), strict=True)
    return Packed([(first.double(), second.double()) for first, second in pairs], limit)


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: object, first: int = 0
) -> Tensor:
    between = middle(x, ids, packed, linear, first)
    return combine(down(between, ids, packed, linear, first), weights).to(x.dtype)


def middle(x: Tensor, ids: Tensor, packed: Packed, linear: object, first: int = 0) -> Tensor:
    experts = packed.experts
    out = torch.zeros(*ids.shape, len(experts[0][0]) // 2, dtype=torch.float64)
    for token in range(len(x)):
        for k, expert in enumerate(ids[token].tolist()):
            if first <= expert < first + len(experts):
                gate, up = (experts[expert - first][0] @ x[token].double()).chunk(2)
                out[token, k] = gated(gate, up, packed.limit)
    return out


def down(middle: Tensor, ids: Tensor, packed: Packed, linear: object, first: int = 0) -> Tensor:
    experts = packed.experts
    out = torch.zeros(*ids.shape, len(experts[0][1]), dtype=torch.float64)
    for token in range(len(ids)):
        for k, expert in enumerate(ids[token].tolist()):
            if first <= expert < first + len(experts):
                out[token, k] = experts[expert - first][1] @ middle[token, k].double()
    return out


def combine(each: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(each[:, 0], dtype=torch.float64)
    for k in range(each.shape[1]):
        out += weights[:, k, None].double() * each[:, k]
    return out
