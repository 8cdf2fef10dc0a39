"""Sort each row by (score, position) and take the first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueline.ops.topk import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["reference"]


def run(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
    out = []
    for row, length in enumerate(lengths.tolist()):
        chosen = list(range(length))
        if length > topk:
            values = scores[row].tolist()
            rank = [-math.inf if math.isnan(value) else value for value in values]
            chosen = sorted(sorted(chosen, key=lambda p: (-rank[p], p))[:topk])
        out.append(chosen + [-1] * (topk - len(chosen)))
    return torch.tensor(out, dtype=torch.long).view(len(out), topk)
