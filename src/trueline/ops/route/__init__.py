"""Which experts a token takes, and with what weight, in the order that RouterSpec states:
`run(logits [n, experts] float32, bias [experts] | None, router, forced=None)` -> ids [n, top_k],
weights [n, top_k] float32. `forced` ids replace the choice (replay); weights still come from the
scores. Ties go to the lowest index.

Layers have tokens: `pack(weight [experts, hidden] float32, dtype, linear)` once, then `choose(x
[n, hidden] of that dtype, packed, linear, bias, router, forced=None)` makes the logits, as exact as
a GEMM in float32, and gives the same pair."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, NATIVE, Capabilities, Opaque
from trueline.ops.linear import LinearOp
from trueline.spec.feedforward import RouterSpec

Packed = TypeVar("Packed")


class Route(Protocol[Packed]):
    capabilities: Capabilities

    def pack(self, weight: Tensor, dtype: torch.dtype, linear: LinearOp) -> Packed: ...

    def choose(
        self,
        x: Tensor,
        packed: Packed,
        linear: LinearOp,
        bias: Tensor | None,
        router: RouterSpec,
        forced: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def run(
        self, logits: Tensor, bias: Tensor | None, router: RouterSpec, forced: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


def pack(weight: Tensor, dtype: torch.dtype, linear: LinearOp) -> Opaque:
    """For implementations that leave the GEMM to `linear`."""
    return linear.pack(weight)


def logits(x: Tensor, packed: Opaque, linear: LinearOp) -> Tensor:
    return linear.run(x.float(), packed)


IMPLEMENTATIONS = {"native": NATIVE, "cpu": CPU, "reference": CPU, "triton": GPU}
