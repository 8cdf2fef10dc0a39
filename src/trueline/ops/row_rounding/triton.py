"""A key a program, and some index rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.row_rounding import IMPLEMENTATIONS, INDEX_GROUP, KEY_GROUP
from trueline.ops.row_rounding.kernels import round_index, round_keys

capabilities = IMPLEMENTATIONS["triton"]

NUMBERS = 1024
"""Of a program's index rows."""


def key(rows: Tensor, *, rope: int) -> Tensor:
    rows = unit_stride(rows)
    plain = rows.shape[1] - rope
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if not len(rows):
        return out
    round_keys[(len(rows),)](
        *(rows, out, rows.stride(0)),
        PLAIN=plain, BLOCK=max(power_of_two(plain), KEY_GROUP), GROUP=KEY_GROUP, ROPE=rope,
        ROPE_BLOCK=power_of_two(max(rope, 1)), num_warps=4,
    )  # fmt: skip
    return out


def index(rows: Tensor) -> Tensor:
    rows, dim = rows.contiguous(), rows.shape[-1]
    out = torch.empty_like(rows)
    count = rows.numel() // dim
    if not count:
        return out
    some = max(NUMBERS // dim, 1)
    round_index[(-(-count // some),)](
        *(rows, out, count, math.sqrt(1 / dim)),
        ROWS=some, DIM=dim, DIGITS=dim.bit_length() - 1, GROUP=min(INDEX_GROUP, dim), num_warps=4,
    )  # fmt: skip
    return out
