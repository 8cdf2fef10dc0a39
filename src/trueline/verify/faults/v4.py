"""Mistakes in what DeepSeek-V4 has outside attention: residual streams, clamped SwiGLU, scores of
the router; and in the rounding of its published numerics."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.hyper_connections import Mixed
from trueline.ops.hyper_connections import cpu as hyper_connections
from trueline.ops.route import cpu as route
from trueline.reference import published
from trueline.verify.faults import Fault, Make


def _transposed(merge: Make) -> Make:
    def broken(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
        made: Tensor = merge(h, y, replace(mixed, carry=mixed.carry.mT.contiguous()))
        return made

    return broken


def _both_sides(swiglu: Make) -> Make:
    def broken(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        gate = gate if limit is None else gate.clamp(min=-limit)
        made: Tensor = swiglu(gate, up, limit)
        return made

    return broken


def _only_above(swiglu: Make) -> Make:
    def broken(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        gate, up = (x if limit is None else x.clamp(max=limit) for x in (gate, up))
        made: Tensor = swiglu(gate, up, None)
        return made

    return broken


def _ties_up(_: Make) -> Make:
    def broken(x: Tensor) -> Tensor:
        values = torch.tensor(published.E2M1, dtype=x.dtype)
        middles = (values[1:] + values[:-1]) / 2
        return values[torch.bucketize(x.abs(), middles, right=True)] * x.sign()

    return broken


OPS, CASE = "V4 op = reference", "v4-small"

V4_FAULTS = [
    Fault("streams-transposed", "streams are merged by the transposed matrix", OPS, CASE,
          hyper_connections, "merge", _transposed),
    Fault("sinkhorn-short", "Sinkhorn, one iteration short", OPS, CASE,
          hyper_connections, "_sinkhorn",
          lambda original: lambda carry, eps, count: original(carry, eps, count - 1)),
    Fault("sinkhorn-rows-first", "Sinkhorn, rows before columns", OPS, CASE,
          hyper_connections, "_sinkhorn",
          lambda original: lambda carry, *rest: original(carry.mT, *rest).mT),
    Fault("clamp-both-sides", "the gate of SwiGLU is clamped from below too", OPS, CASE,
          invariant_math, "swiglu", _both_sides),
    Fault("clamp-missing", "SwiGLU without its limit (vLLM#42287)", OPS, CASE,
          invariant_math, "swiglu",
          lambda original: lambda gate, up, limit: original(gate, up, None)),
    Fault("clamp-up-above", "up of SwiGLU is clamped from above only", OPS, CASE,
          invariant_math, "swiglu", _only_above),
    Fault("softplus-without-root", "scores are softplus, not its square root", OPS, CASE,
          route, "SCORES",
          lambda original: original
              | {"sqrtsoftplus": lambda x: invariant_math.sqrtsoftplus(x).square()}),
    Fault("fp4-ties-up", "numbers half-way between two of fp4 go to the larger", "fp4 rounding",
          "v4-rounded", published, "nearest_e2m1", _ties_up),
]  # fmt: skip
