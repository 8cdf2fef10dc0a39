"""The kernels of `mla_decode` over lists of cells: blocks of one cell each. A small kernel before
them looks the cells up; work is dealt out once a step, as if every list were as long as it can be,
and whoever meets the end of a shorter one stops there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.mla_decode import DecodeTable, Tiling
from trueline.ops.mla_decode.launch_plan import LaunchPlan, launch
from trueline.ops.mla_decode.triton import attend_table
from trueline.ops.mla_decode.work import WorkList, work_list
from trueline.ops.sparse_mla import IMPLEMENTATIONS
from trueline.ops.sparse_mla.kernels import look_up
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["triton"]

CHUNK = 2048
"""Entries of a list looked at together."""


@dataclass(frozen=True, slots=True)
class Prepared:
    table: Table
    works: dict[tuple[int, int], WorkList] = field(default_factory=dict)
    """By heads and length of the lists: made by the first layer that asks, for all."""

    def work(self, heads: int, width: int, view: LatentView) -> WorkList:
        if (heads, width) not in self.works:
            plan = launch_plan(heads, width, len(self.table.lengths), view)
            most = self.table.lengths.clamp(max=width).to(torch.int32)
            self.works[heads, width] = work_list(most, plan)
        return self.works[heads, width]


def launch_plan(heads: int, width: int, rows: int, view: LatentView) -> LaunchPlan:
    sms = num_sms(view.rows.device)
    return launch(heads, view.layout, view.rows.dtype, sms, rows, width)


def prepare(rows: SparseRows | Table, view: LatentView, tiling: Tiling) -> Prepared:
    table = rows if isinstance(rows, Table) else Table.of(rows)
    return Prepared(table.to(view.rows.device))


def run(
    q: Tensor, view: LatentView, prepared: Prepared, positions: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    listed, work = lists(q.shape[1], view, prepared, positions)
    return attend_table(q, view, listed, 1, work, softmax_scale=softmax_scale)


def lists(
    heads: int, view: LatentView, prepared: Prepared, positions: Tensor
) -> tuple[DecodeTable, WorkList]:
    """The chosen cells as blocks of one cell each, and the work over them."""
    table, (rows, width) = prepared.table, positions.shape
    positions = unit_stride(positions)
    cells = positions.new_empty(rows, width, dtype=torch.int32)
    counts = positions.new_empty(rows, dtype=torch.int32)
    if rows:
        look_up[(rows,)](
            positions, table.blocks, table.run, table.lengths, cells, counts, width,
            positions.stride(0), table.blocks.stride(0), BLOCK=view.layout.block_size,
            CHUNK=min(max(power_of_two(width), 16), CHUNK), num_warps=8,
        )  # fmt: skip
    return DecodeTable(counts, cells), prepared.work(heads, width, view)
