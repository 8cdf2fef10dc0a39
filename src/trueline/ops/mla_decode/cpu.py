"""Rows of similar context are computed together, in tiles at absolute positions.

With a small tile the bits of a row depend on nothing but the row: every GEMM has the same
shape, tiles are added in order, and a tile beyond a row's end adds exactly zero.

Queries and keys of 16 bits are multiplied as float32: a GEMM of 16-bit numbers rounds its result to
16 bits, which scores do not survive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops import invariant_math as bits
from trueline.ops.mla_decode import IMPLEMENTATIONS, DecodeRows, DecodeTable, Tiling

capabilities = IMPLEMENTATIONS["cpu"]

# Batched GEMMs of a batch of one take another code path, with other bits.
FEWEST = 2
# Nor are the bits of fewer heads batch-invariant.
INVARIANT_HEADS = 8
BUCKET = 64
# Rows gathered at a time: bounds the memory of a tile.
MOST = 128


@dataclass(frozen=True, slots=True)
class Group:
    rows: Tensor  # [g] which rows of the step
    cells: Tensor  # [g, n] addresses; the zero cell beyond a row's end
    beyond: Tensor | None  # [g, n] positions after a row's end, if there are any
    tile: int
    invariant: bool


def prepare(
    rows: DecodeRows | DecodeTable, view: LatentView, tiling: Tiling, heads: int
) -> list[Group]:
    """Group rows whose contexts take a similar number of tiles, so that padding stays small."""
    assert not isinstance(rows, DecodeTable), "tables are for GPUs"
    buckets: dict[int, list[int]] = {}
    for row, length in enumerate(rows.lengths):
        buckets.setdefault((-(-length // BUCKET)).bit_length(), []).append(row)
    return [
        _group(members[i : i + MOST], rows, view, tiling)
        for _, members in sorted(buckets.items())
        for i in range(0, len(members), MOST)
    ]


def _group(members: list[int], rows: DecodeRows, view: LatentView, tiling: Tiling) -> Group:
    tile = tiling.size
    width = max(1, *(rows.lengths[row] for row in members))
    if tiling.full:
        members = members if len(members) >= FEWEST else members * FEWEST
        width = -(-width // tile) * tile
    size = view.layout.block_size
    num_blocks = -(-width // size)
    blocks = torch.zeros(len(members), num_blocks, dtype=torch.long)
    for i, row in enumerate(members):
        held = rows.block_ids[row][:num_blocks]
        blocks[i, : len(held)] = torch.tensor(held)
    positions = torch.arange(width)
    cells = blocks[:, positions // size] * size + positions % size
    lengths = torch.tensor([rows.lengths[row] for row in members])
    beyond = positions >= lengths[:, None]
    if not bool(beyond.any()):
        return Group(torch.tensor(members), cells, None, tile, tiling.full)
    cells = cells.masked_fill(beyond, view.zero_cell)
    return Group(torch.tensor(members), cells, beyond, tile, tiling.full)


def run(
    q: Tensor, view: LatentView, prepared: list[Group], *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    latent = view.layout.latent
    out = q.new_empty(q.shape[0], q.shape[1], latent)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    dtype, heads, q = q.dtype, q.shape[1], q.float()
    if prepared and prepared[0].invariant:
        q = torch.nn.functional.pad(q, (0, 0, 0, -heads % INVARIANT_HEADS))
    if len(prepared) == 1 and prepared[0].cells.shape[0] == q.shape[0]:
        o, z = _attend(q, view, prepared[0], softmax_scale)  # all rows, in their order
        return o[:, :heads].to(dtype), z[:, :heads]
    for group in prepared:
        o, z = _attend(q[group.rows], view, group, softmax_scale)
        out[group.rows], lse[group.rows] = o[:, :heads].to(dtype), z[:, :heads]
    return out, lse


def _attend(
    q: Tensor, view: LatentView, group: Group, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """q in float32."""
    width, tile = group.cells.shape[1], group.tile
    total: tuple[Tensor, Tensor] | None = None
    for start in range(0, width, tile):
        stop = min(start + tile, width)
        kv = view.gather(group.cells[:, start:stop]).float()
        scores = torch.bmm(q, kv.mT).mul_(softmax_scale)
        if group.beyond is not None:
            scores.masked_fill_(group.beyond[:, None, start:stop], float("-inf"))
        part = softmax_part(scores, kv[..., : view.layout.latent], group.invariant)
        total = part if total is None else merge(total, part, group.invariant)
    assert total is not None
    return total


def softmax_part(scores: Tensor, values: Tensor, invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Normalised output and natural-log sum of one set of keys, all in float32; zero and -inf for
    no key. The scores are used up."""
    log = bits.log if invariant else torch.log
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = bits.exp(scores - top) if invariant else scores.sub_(top).exp_()
    norm = weights.sum(-1, keepdim=True)
    lse = log(norm.squeeze(-1)) + top.squeeze(-1)
    out = torch.bmm(weights, values)
    return out / norm.clamp_min(torch.finfo(torch.float32).tiny), lse


def merge(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Two disjoint sets of keys as one: o = Σ oᵢ exp(lseᵢ - lse). Adding an empty set changes
    no bit."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    exp, log = (bits.exp, bits.log) if invariant else (torch.exp, torch.log)
    top = torch.maximum(lse_a, lse_b)
    base = top.masked_fill(top == float("-inf"), 0.0)
    share_a, share_b = exp(lse_a - base), exp(lse_b - base)
    total = share_a + share_b
    lse = log(total) + base
    mixed = out_a * (share_a / total)[..., None] + out_b * (share_b / total)[..., None]
    empty_a, empty_b = lse_a == float("-inf"), lse_b == float("-inf")
    lse = torch.where(empty_b, lse_a, torch.where(empty_a, lse_b, lse))
    mixed = torch.where(empty_b[..., None], out_a, mixed)
    return torch.where(empty_a[..., None], out_b, mixed), lse
