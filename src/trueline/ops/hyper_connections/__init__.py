"""Several residual streams: what a sub-layer reads of them, and how they take its output.

`mix(h [n, S, D], fn [(2 + S) S, S D], base, scale [3], *, norm_eps, eps, iterations)`, once before
a sub-layer: m = fn · flat(h) / rms(flat(h)), in three parts S | S | S S, each times its scale, plus
its base. pre = sigmoid + eps; post = 2 sigmoid; carry [S, S] = softmax of each row + eps, whose
columns are divided by their sums + eps, then `iterations` - 1 times rows and columns (Sinkhorn).
Returns x = Σ pre_c h_c [n, D] for the sub-layer, with post and carry.

`merge(h, y [n, D], mixed)` -> [n, S, D]: stream k is post_k y + Σ_j carry[j, k] h_j.

`advance(h, y, mixed, fn, base, scale, weight [D], *, norm, norm_eps, eps, iterations)`, between two
sub-layers: h after the merge, and its mix, whose x is normed. `norm` is the plan's RMS norm, for
implementations that have none of their own.

`head(h, fn [S, S D], base [S], scale [1], *, norm_eps, eps)` -> [n, D]: Σ pre_c h_c, after the last
layer.

fn, base and scale are float32. At least float32 inside; x, the streams and the head's output are
rounded to h's dtype once, at the end; post and carry are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, NATIVE_ACTIVATIONS, Capabilities
from trueline.ops.rms_norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Mixed:
    x: Tensor  # [n, D]
    post: Tensor  # [n, S] float32
    carry: Tensor  # [n, S, S] float32; a new stream is a sum over the first S


class HyperConnections(Protocol):
    capabilities: Capabilities

    def mix(
        self,
        h: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        *,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> Mixed: ...

    def merge(self, h: Tensor, y: Tensor, mixed: Mixed) -> Tensor: ...

    def advance(
        self,
        h: Tensor,
        y: Tensor,
        mixed: Mixed,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        weight: Tensor,
        *,
        norm: RMSNorm,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> tuple[Tensor, Mixed]: ...

    def head(
        self, h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
    ) -> Tensor: ...


IMPLEMENTATIONS = {"native": NATIVE_ACTIVATIONS, "cpu": CPU, "reference": CPU, "triton": GPU}
