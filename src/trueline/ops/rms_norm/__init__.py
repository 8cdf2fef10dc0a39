"""x / rms(x) × weight over the last dim: `run(x, weight, eps)`. At least float32 inside, rounded
to x's dtype before the weight, as in Llama.

`run_sum(h, y, weight, eps)` -> h + y, and the norm of that: what stands between two layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, NATIVE, Capabilities


class RMSNorm(Protocol):
    capabilities: Capabilities

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def run_sum(
        self, h: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


IMPLEMENTATIONS = {"native": NATIVE, "cpu": CPU, "reference": CPU, "triton": GPU}
