"""What a latent layer does with a token before attention: norm its latent, rotate its key, put both
into the cache, and rotate the query's rope part.

`run(latent [n, L], key [n, R], queries [n, heads, R], view, cells [n], *, norm, eps, cos, sin,
pairing, parts)` -> a new tensor [n, heads, L + R] whose last R channels are the rotated queries;
the first L are not written: they are where the absorbed query goes. `norm` [L] is the latent's
weight, cos and sin are [n, R/2]. No argument is written, all may be strided; of the view only the
rows at `cells` are, as its layout says. `parts` are the chosen rms_norm and rope, for
implementations made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import CPU, GPU_LATENT, Capabilities
from trueline.ops.rms_norm import RMSNorm
from trueline.ops.rope import Rope
from trueline.spec.rope import Pairing


@dataclass(frozen=True, slots=True)
class Parts:
    rms_norm: RMSNorm
    rope: Rope


class LatentWrite(Protocol):
    capabilities: Capabilities

    def run(
        self,
        latent: Tensor,
        key: Tensor,
        queries: Tensor,
        view: LatentView,
        cells: Tensor,
        *,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pairing: Pairing,
        parts: Parts,
    ) -> Tensor: ...


IMPLEMENTATIONS = {"composed": CPU, "reference": CPU, "triton": GPU_LATENT}
