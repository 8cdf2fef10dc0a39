"""Every layout; keys as they are stored, fp8 cast to the dtype of the queries. Nothing is written
from a row's length on, nor in rows that are not scored: topk looks at neither."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.index import IndexView
from trueline.device import send
from trueline.ops.index_scores import IMPLEMENTATIONS, kernels
from trueline.ops.index_write import check_layout
from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.mla_decode import Tiling
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["triton"]

ALIGNED = 16
"""The stride of rows of scores is a multiple of it: loads of four are aligned."""
SHARE = 4
"""Rows of a run that share the keys a program reads: each key is read once for all of them."""
FEWEST_HEADS = 16
"""Columns of an MMA are a multiple of it."""
WIDEST_FLOAT32 = 64
"""Rows times heads that a float32 MMA has registers for."""
DOT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class ScoresLaunch:
    tile: int
    """Keys of an MMA."""
    splits: int
    """Programs that share a group's tiles."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Prepared:
    table: Table
    groups: Tensor | None  # [groups, 2] int32: first row and count; None: each row for itself
    rows: int  # the most in a group, a power of two
    width: int
    topk: int


def launch(
    groups: int, rows: int, heads: int, width: int, dot: torch.dtype, fp8: bool, sms: int
) -> ScoresLaunch:
    """Decode waits for memory, and wants many small programs; a group of several rows multiplies,
    and wants two at a time. `heads` and `rows` are powers of two. Blocks are looked up a stage
    before keys: an odd number of stages, the next even one adds nothing."""
    if dot == torch.float32:  # without tensor cores: what fits the registers
        tile, warps, stages, busy = 32, 8, 1, 4
    elif rows * heads <= 64:
        tile, warps, stages, busy = 64, 4, 3, 4
    elif rows * heads <= 256 and not fp8:
        tile, warps, stages, busy = 64, 4, 3, 2
    else:
        tile, warps, stages, busy = 64, 8, 3, 1
    tiles = -(-width // tile)
    return ScoresLaunch(tile, max(min(-(-busy * sms // groups), tiles), 1), warps, stages)


def prepare(
    rows: SparseRows | Table, view: IndexView, tiling: Tiling, *, topk: int, share: int = SHARE
) -> Prepared:
    """A table whose numbers the host does not know is as wide as it could be."""
    check_layout(view.layout)
    if isinstance(rows, Table):
        return Prepared(rows, None, 1, rows.blocks.shape[1] * view.layout.block_size, topk)
    table = Table.of(rows).to(view.bytes.device)
    width = max((length for length in rows.lengths if length > topk), default=0)
    most = min(share, power_of_two(max((run.count for run in rows.runs), default=1)))
    if most == 1:
        return Prepared(table, None, 1, width, topk)
    groups = send(_groups(rows, topk, most), view.bytes.device)
    return Prepared(table, groups, most, width, topk)


def _groups(rows: SparseRows, topk: int, most: int) -> Tensor:
    """The longest first, so that the last to end are short."""
    found: list[tuple[int, int, int]] = []
    row = 0
    for run in rows.runs:
        found += [
            (run.length(start), row + start, min(most, run.count - start))
            for start in range(run.num_seeing(topk), run.count, most)
        ]
        row += run.count
    pairs = [(row, count) for _, row, count in sorted(found, reverse=True)]
    return torch.tensor(pairs, dtype=torch.int32, device="cpu").view(-1, 2)


def run(
    q: Tensor, weights: Tensor, view: IndexView, prepared: Prepared, how: ScoresLaunch | None = None
) -> Tensor:
    layout, table = view.layout, prepared.table
    n, heads, dim = q.shape
    q = unit_stride(q)
    scores = q.new_empty(n, -(-prepared.width // ALIGNED) * ALIGNED, dtype=torch.float32)
    scores = scores[:, : prepared.width]
    stored = DTYPES[layout.storage]
    dot = q.dtype if layout.fp8 or stored == q.dtype else torch.float32
    padded = max(power_of_two(heads), FEWEST_HEADS)
    groups, rows = prepared.groups, prepared.rows
    if dot == torch.float32 and rows * padded > WIDEST_FLOAT32:
        groups, rows = None, 1
    count = n if groups is None else len(groups)
    if not scores.numel() or not count:
        return scores
    if how is None:
        fp8, sms = layout.fp8 is not None, num_sms(q.device)
        how = launch(count, rows, padded, prepared.width, dot, fp8, sms)
    kernels.scores[(count, how.splits)](
        *(q, q.stride(0), q.stride(1), weights.contiguous(), view.bytes.view(stored)),
        *(view.bytes.view(torch.float32) if layout.fp8 else None, table.blocks),
        *(table.blocks.stride(0), table.run, table.lengths, groups, scores, scores.stride(0)),
        *(heads, prepared.topk),
        DOT=DOT[dot],
        KIND=layout.kind,
        SIZE=layout.block_size,
        BLOCK=layout.block_bytes,
        TOKEN=layout.token_bytes,
        KEY=layout.key_bytes,
        ITEM=layout.itemsize,
        DIM=dim,
        ROWS=rows,
        HEADS=padded,
        WIDTH=max(power_of_two(dim), 16),
        TILE=how.tile,
        STAGES=how.stages,
        num_warps=how.warps,
    )
    return scores
