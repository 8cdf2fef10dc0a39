from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.mla_decode.cpu import merge, softmax_part
from trueline.ops.mla_prefill import Form, HeadWeights, PrefillRow

# Keys taken at a time: bounds the memory of scores, and skips what causality hides.
KEYS = 512


def run(
    q: Tensor,
    view: LatentView,
    row: PrefillRow,
    heads: HeadWeights,
    *,
    softmax_scale: float,
    form: Form,
) -> Tensor:
    attend = _expanded if form == "expanded" else _absorbed
    return attend(q, view, row, heads, softmax_scale)


def _cells(view: LatentView, row: PrefillRow) -> Tensor:
    size = view.layout.block_size
    positions = torch.arange(row.start + row.count)
    return torch.tensor(row.block_ids)[positions // size] * size + positions % size


def _expanded(
    q: Tensor, view: LatentView, row: PrefillRow, heads: HeadWeights, softmax_scale: float
) -> Tensor:
    latent = view.layout.latent
    by_head = q.transpose(0, 1).contiguous()  # [H, T, P + R]
    H = by_head.shape[0]
    cells = _cells(view, row)

    def part(start: int, stop: int, first: int) -> tuple[Tensor, Tensor]:
        kv = view.gather(cells[start:stop])
        c = kv[:, :latent].expand(H, -1, -1)
        keys = torch.cat((torch.bmm(c, heads.key), kv[:, latent:].expand(H, -1, -1)), dim=-1)
        scores = torch.bmm(by_head[:, first:], keys.mT).float() * softmax_scale
        _hide_later(scores, row.start + first, start)
        return softmax_part(scores, torch.bmm(c, heads.value.mT))

    return _over_keys(row, part).to(q.dtype).transpose(0, 1)


def _absorbed(
    q: Tensor, view: LatentView, row: PrefillRow, heads: HeadWeights, softmax_scale: float
) -> Tensor:
    latent, nope = view.layout.latent, heads.key.shape[2]
    moved = torch.bmm(q[..., :nope].transpose(0, 1), heads.key.mT).transpose(0, 1)
    queries = torch.cat((moved, q[..., nope:]), dim=-1)  # [T, H, L + R]
    H = queries.shape[1]
    cells = _cells(view, row)

    def part(start: int, stop: int, first: int) -> tuple[Tensor, Tensor]:
        kv = view.gather(cells[start:stop])
        flat = queries[first:].reshape(1, -1, queries.shape[-1])
        scores = torch.bmm(flat, kv.T[None]).float() * softmax_scale
        scores = scores.view(-1, H, stop - start).transpose(0, 1).contiguous()
        _hide_later(scores, row.start + first, start)
        out, lse = softmax_part(scores.view(1, -1, stop - start), kv[None, :, :latent])
        return out.view(H, -1, latent), lse.view(H, -1)

    u = _over_keys(row, part).to(q.dtype)  # [H, T, L]
    return torch.bmm(u, heads.value.mT).transpose(0, 1)


def _hide_later(scores: Tensor, first_query: int, first_key: int) -> None:
    """Mask keys after each query; scores [heads, queries, keys], in place."""
    queries, keys = scores.shape[-2:]
    if first_key + keys - 1 <= first_query:
        return
    at = torch.arange(first_query, first_query + queries)[:, None]
    later = torch.arange(first_key, first_key + keys) > at
    scores.masked_fill_(later, float("-inf"))


def _over_keys(row: PrefillRow, part) -> Tensor:  # type: ignore[no-untyped-def]
    """Add up the parts of all keys; a part leaves out queries that come before its keys."""
    stop = row.start + row.count
    out, lse = part(0, min(KEYS, stop), 0)
    for start in range(KEYS, stop, KEYS):
        first = max(0, start - row.start)
        seen = (out[:, first:], lse[:, first:])
        out[:, first:], lse[:, first:] = merge(seen, part(start, min(start + KEYS, stop), first))
    result: Tensor = out
    return result
