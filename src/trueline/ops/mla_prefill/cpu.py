from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import HeadDims
from trueline.ops.mla_decode import MLADecodeOp
from trueline.ops.mla_decode.cpu import merge, softmax_part
from trueline.ops.mla_prefill import (
    IMPLEMENTATIONS,
    Form,
    HeadWeights,
    Part,
    PrefillRow,
    cheaper_form,
)

capabilities = IMPLEMENTATIONS["cpu"]

# Keys expanded at a time, and scores held at a time (in numbers): they fit a cache, and the
# allocator keeps reusing the same memory instead of asking the system for more.
KEYS = 2048
SCORES = 1 << 21


@dataclass(frozen=True, slots=True)
class PreparedRow:
    tokens: slice
    row: PrefillRow
    form: Form
    cells: Tensor  # [start + count]


def prepare(
    parts: Sequence[Part],
    view: LatentView,
    heads: HeadDims,
    decode: MLADecodeOp,
    form: Form | None = None,
) -> list[PreparedRow]:
    made: list[PreparedRow] = []
    for part in parts:
        row = part.row
        cheaper = cheaper_form(heads, view.layout, row.count, row.start + row.count)
        made.append(PreparedRow(part.tokens, row, form or cheaper, _cells(view, row)))
    return made


def run(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    prepared: list[PreparedRow],
    heads: HeadWeights,
    out: Tensor,
    *,
    softmax_scale: float,
) -> None:
    for row in prepared:
        attend = _expanded if row.form == "expanded" else _absorbed
        q = torch.cat((q_nope[row.tokens], q_rope[row.tokens]), dim=-1)
        out[row.tokens] = attend(q, view, row, heads, softmax_scale)


def _cells(view: LatentView, row: PrefillRow) -> Tensor:
    size = view.layout.block_size
    positions = torch.arange(row.start + row.count)
    return torch.tensor(row.block_ids)[positions // size] * size + positions % size


def _expanded(
    q: Tensor, view: LatentView, given: PreparedRow, heads: HeadWeights, softmax_scale: float
) -> Tensor:
    latent, row, cells = view.layout.latent, given.row, given.cells
    by_head = q.transpose(0, 1).float().contiguous()  # [H, T, P + R]
    H = by_head.shape[0]

    def keys_and_values(start: int, stop: int) -> tuple[Tensor, Tensor]:
        kv = view.gather(cells[start:stop])
        c = kv[:, :latent].expand(H, -1, -1)
        rope = kv[:, latent:].expand(H, -1, -1)
        keys = torch.cat((torch.bmm(c, heads.key), rope), dim=-1)
        return keys.float(), torch.bmm(c, heads.value.mT).float()

    def part(kv: tuple[Tensor, Tensor], first: int, stop: int, start: int) -> tuple[Tensor, Tensor]:
        keys, values = kv
        scores = torch.bmm(by_head[:, first:stop], keys.mT).mul_(softmax_scale)
        _hide_later(scores, row.start + first, start)
        return softmax_part(scores, values)

    return _over_keys(row, H, keys_and_values, part).to(q.dtype).transpose(0, 1)


def _absorbed(
    q: Tensor, view: LatentView, given: PreparedRow, heads: HeadWeights, softmax_scale: float
) -> Tensor:
    latent, nope, row, cells = view.layout.latent, heads.key.shape[2], given.row, given.cells
    moved = torch.bmm(q[..., :nope].transpose(0, 1), heads.key.mT)
    queries = torch.cat((moved, q[..., nope:].transpose(0, 1)), dim=-1).float()  # [H, T, L + R]
    H = queries.shape[0]

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        kv = view.gather(cells[start:stop]).float()
        return kv[None], kv[None, :, :latent]

    def part(kv: tuple[Tensor, Tensor], first: int, stop: int, start: int) -> tuple[Tensor, Tensor]:
        keys, values = kv
        flat = queries[:, first:stop].reshape(1, -1, queries.shape[-1])
        scores = torch.bmm(flat, keys.mT).mul_(softmax_scale)
        _hide_later(scores.view(H, stop - first, -1), row.start + first, start)
        out, lse = softmax_part(scores, values)
        return out.view(H, -1, latent), lse.view(H, -1)

    u = _over_keys(row, H, rows, part).to(q.dtype)  # [H, T, L]
    return torch.bmm(u, heads.value.mT).transpose(0, 1)


def _hide_later(scores: Tensor, first_query: int, first_key: int) -> None:
    """Mask keys after each query; scores [heads, queries, keys], in place."""
    queries, keys = scores.shape[-2:]
    if first_key + keys - 1 <= first_query:
        return
    at = torch.arange(first_query, first_query + queries)[:, None]
    later = torch.arange(first_key, first_key + keys) > at
    scores.masked_fill_(later, float("-inf"))


def _over_keys(
    row: PrefillRow,
    heads: int,
    load: Callable[[int, int], tuple[Tensor, Tensor]],
    part: Callable[[tuple[Tensor, Tensor], int, int, int], tuple[Tensor, Tensor]],
) -> Tensor:
    """Blocks of queries over runs of keys, adding up what each run gives; keys that come after a
    block of queries are left out."""
    end = row.start + row.count
    out: Tensor | None = None
    lse = torch.empty(0)
    for start in range(0, end, KEYS):
        keys, values = load(start, min(start + KEYS, end))
        begin = max(0, start - row.start)
        size = max(SCORES // (heads * keys.shape[1]), 1)
        for first in range(begin, row.count, size):
            stop = min(first + size, row.count)
            seen = row.start + stop - start  # keys of this run that the last query sees
            o, z = part((keys[:, :seen], values[:, :seen]), first, stop, start)
            if out is None:
                out = o.new_empty(heads, row.count, o.shape[-1])
                lse = z.new_empty(heads, row.count)
            if start:
                o, z = merge((out[:, first:stop], lse[:, first:stop]), (o, z))
            out[:, first:stop], lse[:, first:stop] = o, z
    assert out is not None
    return out
