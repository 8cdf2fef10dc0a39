"""Every layout and storage, through the view. The keys of a run are read once for all its rows, in
tiles at absolute positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.cache.index import IndexView
from trueline.ops.index_scores import IMPLEMENTATIONS
from trueline.ops.mla_decode import Tiling
from trueline.ops.mla_decode.cpu import FEWEST, INVARIANT_HEADS
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["cpu"]

# Scores of heads held at a time, in numbers: they fit a cache.
PRODUCTS = 1 << 21


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of one run that are scored together."""

    rows: slice
    lengths: Tensor  # [rows]
    cells: Tensor  # [longest] of the sequence


@dataclass(frozen=True, slots=True)
class Prepared:
    parts: tuple[ScoredRows, ...]
    width: int
    tiling: Tiling


def prepare(rows: SparseRows | Table, view: IndexView, tiling: Tiling, *, topk: int) -> Prepared:
    assert not isinstance(rows, Table), "tables are for GPUs"
    parts: list[ScoredRows] = []
    row = 0
    size = view.layout.block_size
    for run in rows.runs:
        unscored = run.num_seeing(topk)
        if unscored < run.count:
            positions = torch.arange(run.longest)
            blocks = torch.tensor(run.block_ids)[positions // size]
            scored = slice(row + unscored, row + run.count)
            lengths = torch.arange(run.first + unscored, run.first + run.count) // run.ratio
            parts.append(ScoredRows(scored, lengths, blocks * size + positions % size))
        row += run.count
    return Prepared(tuple(parts), max((len(part.cells) for part in parts), default=0), tiling)


def run(q: Tensor, weights: Tensor, view: IndexView, prepared: Prepared) -> Tensor:
    scores = torch.full((len(q), prepared.width), float("-inf"))
    tile, full = prepared.tiling.size, prepared.tiling.full
    heads, weights = q.float(), weights.float()
    if full:  # heads that weigh nothing, so that every GEMM has the same shape
        more = -q.shape[1] % INVARIANT_HEADS
        heads, weights = pad(heads, (0, 0, 0, more)), pad(weights, (0, more))
    step = max(PRODUCTS // (heads.shape[1] * tile), 1)
    for part in prepared.parts:
        for start in range(0, len(part.cells), tile):
            keys = view.read(part.cells[start : start + tile])
            count = len(keys)
            keys = pad(keys, (0, 0, 0, tile - count)) if full else keys
            for first in range(part.rows.start, part.rows.stop, step):
                at = slice(first, min(first + step, part.rows.stop))
                made = _products(heads[at], keys, full).relu_()
                sums = (made * weights[at, :, None]).sum(1)[:, :count]
                lengths = part.lengths[at.start - part.rows.start : at.stop - part.rows.start]
                beyond = torch.arange(start, start + count) >= lengths[:, None]
                scores[at, start : start + count] = sums.masked_fill(beyond, float("-inf"))
    return scores


def _products(q: Tensor, keys: Tensor, invariant: bool) -> Tensor:
    """[rows, heads, keys]. One GEMM for all rows is faster; one a row has bits that do
    not depend on the other rows."""
    if not invariant:
        return (q.flatten(0, 1) @ keys.T).view(*q.shape[:2], -1)
    enough = q if len(q) >= FEWEST else q.expand(FEWEST, -1, -1)
    return torch.bmm(enough, keys.T.expand(len(enough), -1, -1))[: len(q)]
