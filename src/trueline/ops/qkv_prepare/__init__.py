"""What a linear-attention layer does with its projection before attention: silu, norms, rotation.

`run(qkv [n, 3 · heads · d], *, heads, silu, norms, eps, rope, parts)` -> q, k and v
[n, heads, d]. All of q's heads come first in a row of qkv, then k's, then v's. Where `silu` says so
it is applied to all three; `norms` are the weights [d] of q's and k's norm of each head, or None;
`rope` has cos and sin [n, dim/2] for the first `dim` channels of q's and k's heads, and their
pairing, or is None. Each of these rounds to qkv's dtype. qkv may be strided and is not written; v
may be a view of it. `parts` are the chosen rms_norm and rope, for implementations made of them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, Capabilities
from trueline.ops.latent_write import Parts
from trueline.spec.rope import Pairing


class QKVPrepare(Protocol):
    capabilities: Capabilities

    def run(
        self,
        qkv: Tensor,
        *,
        heads: int,
        silu: bool,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rope: tuple[Tensor, Tensor, Pairing] | None,
        parts: Parts,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


IMPLEMENTATIONS = {"composed": CPU, "reference": CPU, "triton": GPU}
