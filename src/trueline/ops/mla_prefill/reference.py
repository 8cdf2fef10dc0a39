"""One query, one head at a time, in float64, keys and values made per head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import HeadDims
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import MLADecodeOp
from trueline.ops.mla_prefill import IMPLEMENTATIONS, Form, HeadWeights, Part, PrefillRow

capabilities = IMPLEMENTATIONS["reference"]


def prepare(
    parts: Sequence[Part],
    view: LatentView,
    heads: HeadDims,
    decode: MLADecodeOp,
    form: Form | None = None,
) -> Sequence[Part]:
    return parts


def run(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    prepared: Sequence[Part],
    heads: HeadWeights,
    out: Tensor,
    *,
    softmax_scale: float,
) -> None:
    for part in prepared:
        q = torch.cat((q_nope[part.tokens], q_rope[part.tokens]), dim=-1)
        out[part.tokens] = attend(q, view, part.row, heads, softmax_scale=softmax_scale)


def attend(
    q: Tensor, view: LatentView, row: PrefillRow, heads: HeadWeights, *, softmax_scale: float
) -> Tensor:
    layout = view.layout
    rows = stored_rows(view, layout.cells(row.block_ids, 0, row.start + row.count))
    out = torch.zeros(*q.shape[:2], heads.value.shape[1], dtype=torch.float64)
    for head in range(q.shape[1]):
        keys = torch.cat(
            (rows[:, : layout.latent] @ heads.key[head].double(), rows[:, layout.latent :]), dim=1
        )
        values = rows[:, : layout.latent] @ heads.value[head].double().T
        for i in range(row.count):
            seen = row.start + i + 1
            scores = softmax_scale * (keys[:seen] @ q[i, head].double())
            out[i, head] = scores.softmax(0) @ values[:seen]
    return out.to(q.dtype)
