"""What a linear-attention layer does with what its heads give: a norm of groups of channels, and a
gate.

`run(x [n, channels], gate [n, channels], *, weight [channels], groups, eps, parts)` -> a new tensor
[n, channels] in x's dtype: x / rms(x) of each of `groups` equal runs of channels, times weight,
times sigmoid(gate). At least float32 inside; the norm, the product with the weight, the sigmoid and
the last product are each rounded to x's dtype. x and gate may be strided. `parts` are the chosen
rms_norm and rope, for implementations made of them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, Capabilities
from trueline.ops.latent_write import Parts


class GatedNorm(Protocol):
    capabilities: Capabilities

    def run(
        self, x: Tensor, gate: Tensor, *, weight: Tensor, groups: int, eps: float, parts: Parts
    ) -> Tensor: ...


IMPLEMENTATIONS = {"composed": CPU, "reference": CPU, "triton": GPU}
