from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.capabilities import Opaque
from trueline.ops.experts import IMPLEMENTATIONS
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight, unstack

capabilities = IMPLEMENTATIONS["cpu"]

Expert = tuple[Opaque, Opaque]


@dataclass(frozen=True, slots=True)
class Packed:
    experts: list[Expert]
    width: int
    rows: int
    """Of `down`."""
    limit: float | None


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    pairs = zip(unstack(gate_up), unstack(down), strict=True)
    experts = [(linear.pack(first), linear.pack(second)) for first, second in pairs]
    return Packed(experts, gate_up.shape[1] // 2, down.shape[1], limit)


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    between = middle(x, ids, packed, linear, first)
    return combine(down(between, ids, packed, linear, first), weights)


def middle(x: Tensor, ids: Tensor, packed: Packed, linear: LinearOp, first: int = 0) -> Tensor:
    n, k = ids.shape
    out = x.new_zeros(n * k, packed.width)
    for expert, pairs in _by_expert(ids, packed, first):
        gate, up = linear.run(x[[pair // k for pair in pairs]], expert[0]).chunk(2, dim=-1)
        out[pairs] = invariant_math.swiglu(gate, up, packed.limit)
    return out.view(n, k, -1)


def down(middle: Tensor, ids: Tensor, packed: Packed, linear: LinearOp, first: int = 0) -> Tensor:
    n, k = ids.shape
    out = middle.new_zeros(n * k, packed.rows)
    for expert, pairs in _by_expert(ids, packed, first):
        out[pairs] = linear.run(middle.flatten(0, 1)[pairs], expert[1])
    return out.view(n, k, -1)


def combine(each: Tensor, weights: Tensor) -> Tensor:
    """Σ weight × output over a token's experts, in the order of its ids in any step. Added one by
    one: the order in which torch sums depends on how many channels there are."""
    shares = each.float() * weights[..., None]
    total = torch.zeros_like(shares[:, 0])
    for share in shares.unbind(1):
        total += share
    return total.to(each.dtype)


def _by_expert(ids: Tensor, packed: Packed, first: int) -> Iterator[tuple[Expert, list[int]]]:
    """Each expert of this rank that a token has chosen, and the pairs (token × k + place) that
    have."""
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if first <= expert < first + len(packed.experts):
            pairs.setdefault(expert - first, []).append(pair)
    for expert, several in pairs.items():
        yield packed.experts[expert], several
