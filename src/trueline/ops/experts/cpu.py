from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.capabilities import Opaque
from trueline.ops.experts import IMPLEMENTATIONS
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight, unstack

capabilities = IMPLEMENTATIONS["cpu"]

Packed = list[tuple[Opaque, Opaque]]


def pack(gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp) -> Packed:
    pairs = zip(unstack(gate_up), unstack(down), strict=True)
    return [(linear.pack(first), linear.pack(second)) for first, second in pairs]


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    return combine(each(x, ids, packed, linear, first), weights)


def each(x: Tensor, ids: Tensor, packed: Packed, linear: LinearOp, first: int = 0) -> Tensor:
    n, k = ids.shape
    if n == 1:
        return _one_token(x, ids[0].tolist(), packed, linear, first)
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    by_expert = x[order // k]
    parts = []
    start = 0
    for expert, count in zip(*_runs(flat[order].tolist()), strict=True):
        mine = by_expert[start : start + count]
        here = first <= expert < first + len(packed)
        parts.append(
            _expert(mine, packed[expert - first], linear) if here else torch.zeros_like(mine)
        )
        start += count
    return torch.cat(parts)[order.argsort()].view(n, k, -1)  # back to the order of `flat`


def combine(each: Tensor, weights: Tensor) -> Tensor:
    """Σ weight × output over a token's experts, in the order of its ids in any step."""
    return (each.float() * weights[..., None]).sum(1).to(each.dtype)


def _one_token(x: Tensor, ids: list[int], packed: Packed, linear: LinearOp, first: int) -> Tensor:
    """The same without sorting anything."""
    outputs = [
        _expert(x, packed[e - first], linear)
        if first <= e < first + len(packed)
        else torch.zeros_like(x)
        for e in ids
    ]
    return torch.stack(outputs, dim=1)


def _expert(x: Tensor, packed: tuple[Opaque, Opaque], linear: LinearOp) -> Tensor:
    gate, up = linear.run(x, packed[0]).chunk(2, dim=-1)
    y: Tensor = linear.run(invariant_math.silu(gate) * up, packed[1])
    return y


def _runs(sorted_ids: list[int]) -> tuple[list[int], list[int]]:
    """[3, 3, 5] -> [3, 5], [2, 1]."""
    values: list[int] = []
    counts: list[int] = []
    for value in sorted_ids:
        if values and values[-1] == value:
            counts[-1] += 1
        else:
            values.append(value)
            counts.append(1)
    return values, counts
