"""The kernel of `mla_decode` over lists of cells: all positions chosen, its bits are the same."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.native import library
from trueline.ops.mla_decode import Tiling
from trueline.ops.mla_decode.native import cached_rows
from trueline.ops.sparse_mla import IMPLEMENTATIONS
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["native"]


def prepare(rows: SparseRows | Table, view: LatentView, tiling: Tiling) -> Table:
    assert not isinstance(rows, Table), "tables are for GPUs"
    return Table.of(rows)


def run(
    q: Tensor, view: LatentView, prepared: Table, positions: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    q = q.contiguous()
    rows, heads, _ = q.shape
    cells, counts = prepared.cells(positions.contiguous(), view.layout)
    out = torch.empty(rows, heads, view.layout.latent)
    lse = torch.empty(rows, heads)
    library().sparse_mla(
        *(q.data_ptr(), *cached_rows(view), cells.data_ptr(), cells.shape[1]),
        *(counts.data_ptr(), rows, heads, softmax_scale),
        *(out.data_ptr(), lse.data_ptr()),
    )
    return out, lse
