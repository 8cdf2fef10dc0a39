"""SwiGLU with a limit: gates and ups far beyond it on both sides, a little beyond it, at it. The
limits are small, so that a gate clamped from below shows."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trueline.ops.capabilities import Opaque
from trueline.ops.experts import Experts, SharedExperts
from trueline.ops.experts import reference as experts_reference
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import MLP
from trueline.ops.mlp import reference as mlp_reference
from trueline.ops.registry import implementation
from trueline.verify import bounds
from trueline.verify.ops.basic import LINEAR, experts_bound
from trueline.verify.ops.data import randn, torch_linear, within

LIMITS = (1.5, 0.75)
HIDDEN, WIDTH = 29, 21


def _quarters(*shape: int, seed: int) -> Tensor:
    """Whole quarters from -3 to 3: sums of their products are exact, and some are the limit."""
    return (4 * randn(*shape, seed=seed)).round().clamp(-12, 12) / 4


def _inputs(rows: int, dtype: torch.dtype) -> Tensor:
    x = _quarters(rows, HIDDEN, seed=2) / 4
    x[1::3] *= 16  # far beyond
    x[2::3, 1:] = 0  # one channel: gates are a few whole quarters
    x[2::3, 0] = 1
    return x.to(dtype)


def _weights(*count: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = _quarters(*count, 2 * WIDTH, HIDDEN, seed=seed)
    return gate_up.to(dtype), (randn(*count, HIDDEN, WIDTH, seed=seed + 1) / 4).to(dtype)


def mlp(op: MLP[Opaque], dtype: torch.dtype = torch.float32) -> None:
    for limit in LIMITS:
        for name in LINEAR:
            _mlp(op, dtype, limit, implementation("linear", name))


def _mlp(op: MLP[Opaque], dtype: torch.dtype, limit: float, linear: LinearOp) -> None:
    gate_up, down = _weights(seed=5, dtype=dtype)
    packed = op.pack(gate_up, down, linear, limit)
    exact_packed = mlp_reference.pack(gate_up, down, None, limit)
    for rows in (1, 3, 20):
        x = _inputs(rows, dtype)
        exact = mlp_reference.run(x.double(), exact_packed, None)
        off = bounds.mlp(x, gate_up, down, dtype, limit=limit)
        within(f"mlp, limit {limit}, {rows} rows", op.run(x, packed, linear), exact, off)


def experts(op: Experts[Opaque], dtype: torch.dtype = torch.float32) -> None:
    """By themselves, and with the shared expert among them."""
    for limit in LIMITS:
        _experts(op, dtype, limit)


def _experts(op: Experts[Opaque], dtype: torch.dtype, limit: float) -> None:
    count, linear = 5, torch_linear()
    gate_up, down = _weights(count, seed=7, dtype=dtype)
    shared = _weights(seed=9, dtype=dtype)
    packs = {"": op.pack(gate_up, down, linear, limit)}
    if "pack_with_shared" in op.capabilities.optional:
        sharing = cast("SharedExperts[Opaque]", op)
        packs[", shared"] = sharing.pack_with_shared(gate_up, down, *shared, linear, limit)
    exact_packed = experts_reference.pack(gate_up, down, None, limit)
    for tokens in (3, 20):
        x, weights = _inputs(tokens, dtype), randn(tokens, 2, seed=3).abs()
        ids = randn(tokens, count, seed=4).argsort(1)[:, :2]
        routed = experts_reference.run(x.double(), ids, weights.double(), exact_packed, None)
        beside = mlp_reference.run(x.double(), mlp_reference.pack(*shared, None, limit), None)
        off = experts_bound(x, ids, weights, gate_up, down, limit=limit)
        more = bounds.mlp(x, *shared, dtype, limit=limit) + bounds.rounding(1) * beside.abs()
        for what, packed in packs.items():
            exact = routed + beside if what else routed
            accepted = (off + more if what else off) + bounds.stored(exact, dtype)
            ours = op.run(x, ids, weights, packed, linear)
            within(f"experts, limit {limit}, {tokens} tokens{what}", ours, exact, accepted)
