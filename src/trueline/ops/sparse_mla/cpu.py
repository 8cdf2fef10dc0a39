"""The lists are what `mla_decode` calls groups of rows: gathered a tile at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.mla_decode import Tiling
from trueline.ops.mla_decode import cpu as decode
from trueline.ops.sparse_mla import IMPLEMENTATIONS
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["cpu"]


@dataclass(frozen=True, slots=True)
class Prepared:
    table: Table
    tiling: Tiling


def prepare(rows: SparseRows | Table, view: LatentView, tiling: Tiling) -> Prepared:
    assert not isinstance(rows, Table), "tables are for GPUs"
    return Prepared(Table.of(rows), tiling)


def run(
    q: Tensor, view: LatentView, prepared: Prepared, positions: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    cells, counts = prepared.table.cells(positions, view.layout)
    groups = [
        _group(torch.arange(start, min(start + decode.MOST, len(q))), cells, counts, view, prepared)
        for start in range(0, len(q), decode.MOST)
    ]
    return decode.run(q, view, groups, softmax_scale=softmax_scale)


def _group(
    rows: Tensor, cells: Tensor, counts: Tensor, view: LatentView, prepared: Prepared
) -> decode.Group:
    tiling = prepared.tiling
    width = max(int(counts[rows].max()), 1)
    if tiling.full:
        rows = rows if len(rows) >= decode.FEWEST else rows.expand(decode.FEWEST)
        width = -(-width // tiling.size) * tiling.size
    listed = torch.nn.functional.pad(cells[rows], (0, max(width - cells.shape[1], 0)))[:, :width]
    beyond = torch.arange(width) >= counts[rows, None]
    listed = listed.masked_fill(beyond, view.zero_cell)
    return decode.Group(rows, listed, beyond, tiling.size, tiling.full)
