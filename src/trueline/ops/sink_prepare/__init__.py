"""What compressed attention does with its tokens before and after its attention: norms, rotations,
and the rows of the window.

- `write(projected [n, rank + width], view, cells [n], *, norms, eps, rope, rms_norm)` -> a new
  tensor [n, rank]: the latent of the queries, normed by norms[0] [rank]. What stands behind it,
  normed by norms[1] [width] and rotated, is the token's row of the window, at `cells` of the view.
  Of the view nothing else is written, and `projected`, which may be strided, is not.
- `queries(q [n, heads, width], *, eps, rope, rms_norm)` -> a new tensor: each head normed without a
  weight, and rotated. q is not written.
- `rotate(x [n, heads, width], *, rope, back=False)` -> x, rotated where it stands; `back`: by the
  opposite angles.

`rope` has cos and sin [n, dim/2] for the last `dim` channels, their pairing, and the chosen rope;
`rms_norm` is the chosen norm: both for implementations made of them. A norm rounds as rms_norm
does, a rotation rounds once more."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import CPU, Capabilities
from trueline.ops.rms_norm import RMSNorm
from trueline.ops.rope import Rope
from trueline.ops.sink_attention import GPU_SINK
from trueline.spec.rope import Pairing


class Rotation(NamedTuple):
    cos: Tensor  # [n, dim/2]
    sin: Tensor
    pairing: Pairing
    rope: Rope


class SinkPrepare(Protocol):
    capabilities: Capabilities

    def write(
        self,
        projected: Tensor,
        view: LatentView,
        cells: Tensor,
        *,
        norms: tuple[Tensor, Tensor],
        eps: float,
        rope: Rotation,
        rms_norm: RMSNorm,
    ) -> Tensor: ...

    def queries(self, q: Tensor, *, eps: float, rope: Rotation, rms_norm: RMSNorm) -> Tensor: ...

    def rotate(self, x: Tensor, *, rope: Rotation, back: bool = False) -> Tensor: ...


IMPLEMENTATIONS = {"composed": CPU, "reference": CPU, "triton": GPU_SINK}
