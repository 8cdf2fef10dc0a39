"""The positions that a row attends to: `run(scores [n, width], lengths [n], topk)` -> int64
[n, topk], ascending, -1 after the last.

- A row that sees at most `topk` positions gets all of them; its scores are not looked at.
- Otherwise exactly the `topk` largest of its first `length` scores; among equal ones the lowest
  positions. Whatever stands after a row's length is not looked at.
- -0 equals 0. A NaN ranks with -inf: it never displaces a number, and every row has a full list.

Ascending: equal sets are equal lists, so sums over them have equal bits, and memory is walked one
way.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, NATIVE, Capabilities


class TopK(Protocol):
    capabilities: Capabilities

    def run(self, scores: Tensor, lengths: Tensor, topk: int) -> Tensor: ...


IMPLEMENTATIONS = {"native": NATIVE, "cpu": CPU, "reference": CPU, "triton": GPU}
