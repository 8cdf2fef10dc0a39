"""One row, one head, one key at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import Tiling
from trueline.ops.sparse_mla import IMPLEMENTATIONS
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["reference"]


def prepare(rows: SparseRows | Table, view: LatentView, tiling: Tiling) -> SparseRows:
    assert not isinstance(rows, Table), "tables are for GPUs"
    return rows


def run(
    q: Tensor, view: LatentView, prepared: SparseRows, positions: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    latent, size = view.layout.latent, view.layout.block_size
    out = torch.zeros(*q.shape[:2], latent, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    owners = [run.block_ids for run in prepared.runs for _ in range(run.count)]
    for row, block_ids in enumerate(owners):
        listed = positions[row].tolist()
        chosen = listed[: listed.index(-1)] if -1 in listed else listed
        cells = [block_ids[p // size] * size + p % size for p in chosen]
        keys = stored_rows(view, cells) if cells else torch.empty(0)
        for head in range(q.shape[1] if cells else 0):
            query = q[row, head].double()
            dots = torch.stack([query @ key for key in keys]) * softmax_scale
            out[row, head] = dots.softmax(0) @ keys[:, :latent]
            lse[row, head] = dots.logsumexp(0)
    return out.to(q.dtype), lse.float()
