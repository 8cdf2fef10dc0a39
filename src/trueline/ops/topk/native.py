from __future__ import annotations

import torch
from torch import Tensor

from trueline.native import library
from trueline.ops.topk import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["native"]


def run(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
    scores = scores.float()
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    lengths = lengths.contiguous()
    out = torch.empty(len(lengths), topk, dtype=torch.long)
    library().index_topk(
        *(scores.data_ptr(), scores.stride(0), lengths.data_ptr()),
        *(len(lengths), topk, out.data_ptr()),
    )
    return out
