"""One row, one head, one key at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import IMPLEMENTATIONS, DecodeRows, DecodeTable, Tiling

capabilities = IMPLEMENTATIONS["reference"]


def prepare(
    rows: DecodeRows | DecodeTable, view: LatentView, tiling: Tiling, heads: int
) -> DecodeRows:
    assert not isinstance(rows, DecodeTable), "tables are for GPUs"
    return rows


def run(
    q: Tensor, view: LatentView, prepared: DecodeRows, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    latent = view.layout.latent
    out = torch.zeros(*q.shape[:2], latent, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for row in range(q.shape[0]):
        cells = prepared.cells(row, view.layout)
        keys = stored_rows(view, cells)
        for head in range(q.shape[1]):
            query = q[row, head].double()
            scores = [softmax_scale * float(query @ key) for key in keys]
            if scores:
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out[row, head] = weights @ keys[:, :latent]
                lse[row, head] = torch.tensor(scores, dtype=torch.float64).logsumexp(0)
    return out.to(q.dtype), lse.float()
