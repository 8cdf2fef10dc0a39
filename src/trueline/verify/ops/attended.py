"""Latent attention by its references, with the bounds of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.mla_decode import reference as decode_reference
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import reference as prefill_reference
from trueline.ops.sparse_mla import reference as sparse_reference
from trueline.ops.sparse_rows import SparseRows
from trueline.verify import bounds
from trueline.verify.bounds import Attended


def decode(q: Tensor, view: LatentView, rows: DecodeRows, scale: float) -> Attended:
    """q [n, heads, width] in the dtype that is computed in."""
    out, lse = decode_reference.run(q.double(), view, rows, softmax_scale=scale)
    keys = [stored_rows(view, rows.cells(row, view.layout)) for row in range(len(q))]
    return Attended(out, lse, *_latent(q, keys, scale, view.layout.latent))


def listed(
    q: Tensor, view: LatentView, rows: SparseRows, positions: Tensor, scale: float
) -> Attended:
    out, lse = sparse_reference.run(q.double(), view, rows, positions, softmax_scale=scale)
    keys = [stored_rows(view, cells) for cells in _listed_cells(view, rows, positions)]
    return Attended(out, lse, *_latent(q, keys, scale, view.layout.latent))


def _listed_cells(view: LatentView, rows: SparseRows, positions: Tensor) -> list[list[int]]:
    size = view.layout.block_size
    owners = [run.block_ids for run in rows.runs for _ in range(run.count)]
    cells = []
    for ids, each in zip(owners, positions.tolist(), strict=True):
        cells.append([ids[p // size] * size + p % size for p in _listed(each)])
    return cells


def _listed(positions: list[int]) -> list[int]:
    return positions[: positions.index(-1)] if -1 in positions else positions


def _latent(q: Tensor, keys: list[Tensor], scale: float, latent: int) -> tuple[Tensor, Tensor]:
    """Bounds where a query meets cache rows as they are."""
    made = []
    for row, each in zip(q.double(), keys, strict=True):
        key = each.double()
        off = scale * bounds.gemm(row, key, q.dtype)
        made.append(bounds.softmax(scale * (row @ key.mT), off, key[:, :latent], dtype=q.dtype))
    if not made:
        none = torch.zeros(q.shape[:2], dtype=torch.float64)
        return none, none
    return torch.stack([out for out, _ in made]), torch.stack([lse for _, lse in made])


def prefill(
    q: Tensor, view: LatentView, row: PrefillRow, heads: HeadWeights, scale: float
) -> Attended:
    """q [count, heads, nope + rope]; in either form, so the bounds are of the coarser one."""
    out = prefill_reference.attend(q.double(), view, row, heads, softmax_scale=scale)
    seen: list[slice | list[int]] = [slice(row.start + i + 1) for i in range(row.count)]
    return Attended(out, torch.empty(0), *_expanded(q, _held(view, row), seen, heads, scale))


def _held(view: LatentView, row: PrefillRow) -> Tensor:
    """What the cache has of a run, [positions, width]."""
    return stored_rows(view, view.layout.cells(row.block_ids, 0, row.start + row.count))


def chosen(
    q: Tensor,
    view: LatentView,
    row: PrefillRow,
    heads: HeadWeights,
    rows: SparseRows,
    positions: Tensor,
    scale: float,
) -> Attended:
    """The same, of tokens that see only the positions listed."""
    nope = heads.key.shape[-1]
    moved = torch.einsum("nhp,hlp->nhl", q[..., :nope].double(), heads.key.double())
    absorbed = torch.cat((moved, q[..., nope:].double()), dim=-1)
    made, _ = sparse_reference.run(absorbed, view, rows, positions, softmax_scale=scale)
    out = torch.einsum("nhl,hvl->nhv", made, heads.value.double())
    seen: list[slice | list[int]] = [_listed(each) for each in positions.tolist()]
    return Attended(out, torch.empty(0), *_expanded(q, _held(view, row), seen, heads, scale))


def _expanded(
    q: Tensor, held: Tensor, seen: list[slice | list[int]], heads: HeadWeights, scale: float
) -> tuple[Tensor, Tensor]:
    """Of queries [n, heads, nope + rope] and the positions that each sees. Keys and values are
    computed by a GEMM, or queries and results: its error and, in a 16-bit dtype, its rounding
    scatter into every score and every row."""
    nope, latent = heads.key.shape[-1], heads.key.shape[1]
    key_weights, value_weights = heads.key.double(), heads.value.double()
    inner, key_rope = held[:, :latent].double(), held[:, latent:].double()
    keys, key_squares = inner @ key_weights, inner.square() @ key_weights.square()
    values = inner @ value_weights.mT  # [h, s, v]
    sizes = (inner.square() @ value_weights.square().mT).sqrt()
    off_values = bounds.dot_bound(latent, sizes, q.dtype) + bounds.scattered(sizes, q.dtype)
    lengths = off_values.norm(dim=-1)
    made = []
    for row, at in zip(q.double(), seen, strict=True):
        straight, rotated = row[:, :nope, None], row[:, nope:]
        scores = (keys[:, at] @ straight)[..., 0] + rotated @ key_rope[at].mT
        # of all products of a query, a weight and a number of the cache
        triples = (key_squares[:, at] @ straight.square())[..., 0]
        size = (triples + rotated.square() @ key_rope[at].square().mT).sqrt()
        absorbed = (key_weights @ straight)[..., 0]  # [h, latent]
        either = (keys[:, at].square() @ straight.square())[..., 0]
        either = either.maximum(absorbed.square() @ inner[at].square().mT)
        off = bounds.dot_bound(nope + held.shape[1], size, q.dtype)
        off = scale * (off + bounds.scattered(either.sqrt(), q.dtype))
        made.append(bounds.softmax(scale * scores, off, values[:, at], lengths[:, at], q.dtype))
    return torch.stack([out for out, _ in made]), torch.stack([lse for _, lse in made])
