"""One kernel for a step's keys, one for its queries."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.index import IndexView
from trueline.ops.index_write import IMPLEMENTATIONS, check_layout, kernels
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.rope import Rope
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["triton"]

HEADS = 8
"""Of a token, that a program rotates."""


def run(
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
) -> None:
    layout, fp8 = view.layout, view.layout.fp8
    check_layout(layout)
    if not len(cells):
        return
    key, cos, sin = (unit_stride(x) for x in (key, cos, sin))
    kernels.write[(len(cells),)](
        *(key, key.stride(0), view.bytes.view(DTYPES[layout.storage])),
        *(view.bytes.view(torch.float32) if fp8 else None, cells.contiguous()),
        *(norm, bias, cos, sin, cos.stride(0), sin.stride(0), eps),
        INTERLEAVED=pairing == "interleaved",
        LARGEST=fp8.largest if fp8 else 0.0,
        POWER_OF_TWO=layout.power_of_two,
        KIND=layout.kind,
        SIZE=layout.block_size,
        BLOCK=layout.block_bytes,
        TOKEN=layout.token_bytes,
        KEY=layout.key_bytes,
        ITEM=layout.itemsize,
        DIM=layout.dim,
        ROPE=2 * cos.shape[1],
        WIDTH=power_of_two(layout.dim),
        num_warps=1,
    )


def rotate(q: Tensor, *, cos: Tensor, sin: Tensor, pairing: Pairing, rope: Rope) -> Tensor:
    n, heads, dim = q.shape
    q, cos, sin = (unit_stride(x) for x in (q, cos, sin))
    out = q.new_empty(q.shape)
    if out.numel():
        kernels.rotate[(n, -(-heads // HEADS))](
            *(q, q.stride(0), q.stride(1), out, cos, sin, cos.stride(0), sin.stride(0), heads),
            INTERLEAVED=pairing == "interleaved",
            DIM=dim,
            ROPE=2 * cos.shape[1],
            HEADS=HEADS,
            WIDTH=power_of_two(dim),
        )
    return out
