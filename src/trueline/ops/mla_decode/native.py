"""Reads the cache in place, eight heads at a time, in tiles of 64 keys at absolute positions:
nothing is gathered, and a row's bits depend on nothing but the row, whatever the tiling asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.native import library
from trueline.ops.block_tables import padded
from trueline.ops.mla_decode import IMPLEMENTATIONS, DecodeRows, DecodeTable, Tiling

capabilities = IMPLEMENTATIONS["native"]

PLAIN = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As in native/halves.h."""


@dataclass(frozen=True, slots=True)
class Prepared:
    block_ids: Tensor  # [rows, most]
    lengths: Tensor  # [rows]


def prepare(
    rows: DecodeRows | DecodeTable, view: LatentView, tiling: Tiling, heads: int
) -> Prepared:
    assert not isinstance(rows, DecodeTable), "tables are for GPUs"
    return Prepared(padded(rows.block_ids), torch.tensor(rows.lengths))


def run(
    q: Tensor, view: LatentView, prepared: Prepared, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    q = q.contiguous()
    rows, heads, _ = q.shape
    layout = view.layout
    out = torch.empty(rows, heads, layout.latent)
    lse = torch.empty(rows, heads)
    library().mla_decode(
        *(q.data_ptr(), *cached_rows(view), prepared.block_ids.data_ptr()),
        *(prepared.block_ids.shape[1], prepared.lengths.data_ptr(), layout.block_size),
        *(rows, heads, softmax_scale, out.data_ptr(), lse.data_ptr()),
    )
    return out, lse


def cached_rows(view: LatentView) -> tuple[int | float, ...]:
    """As kernels take them."""
    layout, fp8, plain = view.layout, view.layout.fp8, PLAIN[view.dtype]
    row = (view.rows.data_ptr(), view.rows.stride(0) * view.rows.itemsize)
    dims = (layout.latent, layout.rope)
    if fp8 is None:
        return (*row, *dims, 0, 0, 0, 0.0, 0, plain)
    starts = (fp8.group, layout.scales_start, layout.rope_start)
    return (*row, *dims, *starts, fp8.variant.step, fp8.variant.nan, plain)
