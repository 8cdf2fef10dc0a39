"""Numerics `published`: what DeepSeek-V4's own inference code rounds before attention and index
scores read it, quantised and dequantised at once.

- `key(rows [n, d], *, rope)` -> [n, d]: rows of the window and compressed entries, rotated. To
  bfloat16. Then each group of KEY_GROUP channels, of all but the last `rope`, to e4m3 and back:
  scale = max(amax, 1e-4) / 448, rounded up to a power of two. What is left of the channels is a
  group too.
- `index(rows [..., d])` -> [..., d]: index queries and keys, rotated; d is a power of two. To
  bfloat16, times the Hadamard matrix (Sylvester's order) over √d, to bfloat16 again. Then each
  group of INDEX_GROUP channels, of d where that is less, to e2m1 and back:
  scale = max(amax, 6 · 2^-126) / 6, rounded up to a power of two; halfway between two numbers, the
  one with the even code.

float32 inside. The result has the dtype of the rows, float32 or bfloat16, which both hold it
exactly; rows may be strided and are not written. A group with an infinity or a NaN becomes NaN: it
stays visible. A row's bits depend on the row alone in a batch-invariant implementation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, Capabilities

KEY_GROUP, INDEX_GROUP = 64, 32
EXACT = (torch.float32, torch.bfloat16)
"""float16 lacks the smallest of these numbers."""


class RowRounding(Protocol):
    capabilities: Capabilities

    def key(self, rows: Tensor, *, rope: int) -> Tensor: ...

    def index(self, rows: Tensor) -> Tensor: ...


IMPLEMENTATIONS = {
    "triton": replace(GPU, dtypes=EXACT),
    "composed": replace(CPU, devices=("cpu", "cuda"), dtypes=EXACT, capture=True),
    "reference": CPU,
}
