"""A GEMM per head: `pack(weight [heads, out, in], linear, batch_invariant)` once; `run(x [n, heads,
in], packed, to=None)` -> [n, heads, out], in `to` where that is given: rows of a wider tensor, say.
`batch_invariant`: a row's bits must not depend on the others."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, NATIVE, Capabilities
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight

Packed = TypeVar("Packed")


class BatchedGemm(Protocol[Packed]):
    capabilities: Capabilities

    def pack(self, weight: Weight | Tensor, linear: LinearOp, batch_invariant: bool) -> Packed: ...

    def run(self, x: Tensor, packed: Packed, to: Tensor | None = None) -> Tensor: ...


IMPLEMENTATIONS = {
    "native": NATIVE,
    "cpu": CPU,
    "reference": CPU,
    "triton": GPU,
    "cublas": GPU,
}
