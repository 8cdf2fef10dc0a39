from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueline.device import large_empty
from trueline.native import packable, panel, scaled, weighted
from trueline.ops.linear import LinearOp
from trueline.ops.linear import native as linear_native
from trueline.ops.mlp import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["native"]


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Tensor
    down: Tensor
    width: int
    rows: int
    inner: int
    """Of `down`: more than `width` where this rank has some rows over the width of all."""
    limit: float = math.inf


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    if stored := scaled.as_stored(gate_up, down):
        packed = pack_stored(stored[:1], stored[1:], large_empty)
    else:
        packed = pack_dense(dense(gate_up)[None], dense(down)[None], large_empty)
    return clamped(replace(packed, gate_up=packed.gate_up[0], down=packed.down[0]), limit)


def clamped(packed: Packed, limit: float | None) -> Packed:
    return packed if limit is None else replace(packed, limit=limit)


def pack_stored(
    gate_up: Sequence[Weight], down: Sequence[Weight], empty: Callable[..., Tensor]
) -> Packed:
    """Several, one after the other, in codes; into memory that `empty` gives."""
    width, (rows, inner) = gate_up[0].shape[0] // 2, down[0].shape
    first = scaled.pack(gate_up, scaled.pairs_of(width), empty)
    second = scaled.pack(down, scaled.columns_of(rows), empty)
    return Packed(first, second, width, rows, inner)


def pack_dense(gate_up: Tensor, down: Tensor, empty: Callable[..., Tensor]) -> Packed:
    """The same of plain numbers: [count, 2 width, hidden] and [count, rows, inner]."""
    gate_up, down = packable(gate_up), packable(down)
    count, rows, inner = down.shape
    width, hidden = gate_up.shape[1] // 2, gate_up.shape[2]
    first = empty(count, -(-width // (panel() // 2)) * panel() * hidden, dtype=gate_up.dtype)
    second = empty(count, -(-rows // panel()) * panel() * inner, dtype=down.dtype)
    pack_pairs, pack_columns = (
        weighted(name, down.dtype) for name in ("pack_gate_up", "pack_weight")
    )
    for e in range(count):
        pack_pairs(gate_up[e].data_ptr(), width, hidden, first[e].data_ptr())
        pack_columns(down[e].data_ptr(), rows, inner, second[e].data_ptr())
    return Packed(first, second, width, rows, inner)


def run(x: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape)
    weighted("gated", packed.down.dtype)(
        *(x.data_ptr(), x.stride(0), packed.gate_up.data_ptr(), packed.down.data_ptr()),
        *(out.data_ptr(), *x.shape, packed.width, packed.limit),
    )
    return out


def middle(x: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), packed.width)
    weighted("middle", packed.gate_up.dtype)(
        *(x.data_ptr(), x.stride(0), packed.gate_up.data_ptr(), out.data_ptr()),
        *(*x.shape, packed.width, packed.limit),
    )
    return out


def down(middle: Tensor, packed: Packed, linear: LinearOp) -> Tensor:
    return linear_native.run(middle, linear_native.Packed(packed.down, packed.rows, packed.inner))
