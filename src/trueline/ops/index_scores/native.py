"""Keys are decoded from the cache's bytes, a tile of 64 at a time, once for all rows of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.native import library
from trueline.ops.capabilities import Context
from trueline.ops.index_scores import IMPLEMENTATIONS
from trueline.ops.mla_decode import Tiling
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["native"]

TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    blocks: Tensor  # [runs, most]
    runs: Tensor  # [runs, 2]: first row that is scored, row after the last
    lengths: Tensor  # [n]
    items: Tensor  # [tiles, 2]: run and first position
    width: int
    keys: Tensor  # [block_size] where the key of each place of a block starts
    scales: Tensor  # [block_size] and its scale


def prepare(rows: SparseRows | Table, view: IndexView, tiling: Tiling, *, topk: int) -> Prepared:
    assert not isinstance(rows, Table), "tables are for GPUs"
    layout = view.layout
    refused = capabilities.refuses(Context(dtype=torch.float32, index=layout))
    assert not refused, refused
    runs, items, row, width = [], [], 0, 0
    for i, run in enumerate(rows.runs):
        skipped = run.num_seeing(topk)
        runs.append((row + skipped, row + run.count))
        if skipped < run.count:
            items += [(i, start) for start in range(0, run.longest, TILE)]
            width = max(width, run.longest)
        row += run.count
    places = torch.arange(layout.block_size)
    table = Table.of(rows)
    return Prepared(
        blocks=table.blocks,
        lengths=table.lengths,
        runs=torch.tensor(runs, dtype=torch.long),
        items=torch.tensor(items, dtype=torch.long),
        width=width,
        keys=layout.key_start(places),
        scales=layout.scale_start(places),
    )


def run(q: Tensor, weights: Tensor, view: IndexView, prepared: Prepared) -> Tensor:
    q, weights = q.contiguous(), weights.contiguous()
    layout = view.layout
    scores = torch.full((len(q), prepared.width), float("-inf"))
    length, distance = layout.run
    step, nan = (layout.fp8.step, layout.fp8.nan) if layout.fp8 else (0.0, 0)
    library().index_scores(
        *(q.data_ptr(), weights.data_ptr(), view.bytes.data_ptr()),
        *(prepared.blocks.data_ptr(), prepared.blocks.shape[1]),
        *(prepared.keys.data_ptr(), prepared.scales.data_ptr(), layout.block_size),
        *(layout.block_bytes, length, distance, step, nan),
        *(prepared.runs.data_ptr(), prepared.lengths.data_ptr()),
        *(len(prepared.items), prepared.items.data_ptr()),
        *(q.shape[1], layout.dim, scores.data_ptr(), prepared.width),
    )
    return scores
