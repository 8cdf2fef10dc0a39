"""Keys are read from the caches in place, eight heads at a time, in tiles of 64: first those of the
window, then the entries. A token's bits depend on nothing but the token, whatever the tiling asked.
Numbers of 16 bits are multiplied as float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.native import library
from trueline.ops.mla_decode import Tiling
from trueline.ops.mla_decode.native import cached_rows
from trueline.ops.sink_attention import IMPLEMENTATIONS, SinkRows, SinkTable
from trueline.ops.sparse_rows import Run, SparseRows, Table

capabilities = IMPLEMENTATIONS["native"]


@dataclass(frozen=True, slots=True)
class Prepared:
    window: Table
    oldest: Tensor  # [n] position, counted from the table's first
    near: Tensor  # [n] positions from there on
    entries: Table | None


def prepare(
    rows: SinkRows | SinkTable,
    window: LatentView,
    entries: LatentView | None,
    tiling: Tiling,
    *,
    size: int,
    ratio: int,
) -> Prepared:
    assert not isinstance(rows, SinkTable), "tables are for GPUs"
    near = Table.of(rows.near(size, window.layout.block_size))
    _check(near, window)
    oldest = (near.lengths - size).clamp_min(0)
    far = None
    if entries is not None:
        seen = (Run(r.entries, r.start + 1, r.count, ratio) for r in rows.runs)
        far = Table.of(SparseRows(tuple(seen)))
    return Prepared(near, oldest, near.lengths - oldest, far)


def _check(table: Table, view: LatentView) -> None:
    """What is read from a table's row is in it: the kernel asks no more."""
    room = table.blocks.shape[1] * view.layout.block_size
    if len(table.lengths) and int(table.lengths.max()) > room:
        raise ValueError(f"a token sees {int(table.lengths.max())} rows in blocks of {room}")


def run(
    q: Tensor,
    window: LatentView,
    entries: LatentView | None,
    prepared: Prepared,
    *,
    sinks: Tensor,
    softmax_scale: float,
    chosen: Tensor | None,
) -> Tensor:
    wide, sinks = q.float().contiguous(), sinks.float().contiguous()
    near, made = prepared.window, prepared.entries
    far, cells = torch.zeros_like(near.lengths), None
    if made is not None:
        assert entries is not None
        _check(made, entries)
        far = made.lengths
        if chosen is not None:
            cells, far = made.cells(chosen, entries.layout)
    other = entries or window
    table = made or near
    out = torch.empty(wide.shape)
    library().sink_attention(
        *(wide.data_ptr(), *cached_rows(window), *cached_rows(other)),
        *(near.blocks.data_ptr(), near.blocks.shape[1], window.layout.block_size),
        *(table.blocks.data_ptr(), table.blocks.shape[1], other.layout.block_size),
        *(near.run.data_ptr(), prepared.oldest.data_ptr(), prepared.near.data_ptr()),
        *(far.data_ptr(), 0 if cells is None else cells.data_ptr()),
        *(0 if cells is None else cells.shape[1], sinks.data_ptr()),
        *(q.shape[0], q.shape[1], softmax_scale, out.data_ptr()),
    )
    return out.to(q.dtype)
