"""What an indexer does with its keys and queries before scores.

- `run(key [n, dim], view, cells [n], *, norm, bias, eps, cos, sin, pairing, rope)`: layer norm in
  float32 by `norm` and `bias` [dim], rounded to the key's dtype; the first channels rotated, as
  many as cos and sin [n, half] have angles for, and rounded again; stored as the view's layout
  says. Of the view only the bytes of `cells` are written.
- `rotate(q [n, heads, dim], *, cos, sin, pairing, rope)` -> a new tensor, its first channels
  rotated.

No argument is written, all may be strided. `rope` is the chosen rotation, for implementations made
of it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.layout import SCALE_BYTES, IndexLayout
from trueline.ops.capabilities import CPU, FLOATS, Capabilities, Context
from trueline.ops.rope import Rope
from trueline.spec.rope import Pairing


class IndexWrite(Protocol):
    capabilities: Capabilities

    def run(
        self,
        key: Tensor,
        view: IndexView,
        cells: Tensor,
        *,
        norm: Tensor,
        bias: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pairing: Pairing,
        rope: Rope,
    ) -> None: ...

    def rotate(
        self, q: Tensor, *, cos: Tensor, sin: Tensor, pairing: Pairing, rope: Rope
    ) -> Tensor: ...


def gpu_layout_refusals(context: Context) -> list[str]:
    """Of the index cache, which `index_scores` reads by the same rules."""
    layout = context.index
    if layout is not None and layout.storage == "e4m3fnuz":
        return ["e4m3fnuz is no number format of this device: e4m3fn is"]
    if layout is not None and layout.fp8 and layout.key_bytes % SCALE_BYTES:
        return [f"reads fp8 keys of a multiple of {SCALE_BYTES} numbers, not of {layout.dim}"]
    return []


def check_layout(layout: IndexLayout) -> None:
    refused = gpu_layout_refusals(Context(dtype=torch.float32, index=layout))
    assert not refused, refused


GPU_INDEX = Capabilities(
    devices=("cuda",), dtypes=FLOATS, capture=True, refuses=gpu_layout_refusals
)
IMPLEMENTATIONS = {"composed": CPU, "reference": CPU, "triton": GPU_INDEX}
