from __future__ import annotations

import torch
from torch import Tensor

from trueline.native import library
from trueline.ops.rope import IMPLEMENTATIONS
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["native"]


def run(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    n, heads, dim = x.shape
    y = torch.empty(x.shape)
    library().rotate(
        *(x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr(), y.data_ptr()),
        *(n, heads, dim // 2, int(pairing == "interleaved")),
    )
    return y
