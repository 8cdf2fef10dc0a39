"""The kernels of `mla_decode` over lists of cells: blocks of one cell each. A small kernel before
them looks the cells up. Splits are scheduled once a step, as if every list were as long as it can
be; a program stops at the end of a shorter one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.mla_decode import DecodeTable, Tiling
from trueline.ops.mla_decode.launch_plan import LaunchPlan, launch
from trueline.ops.mla_decode.split_schedule import SplitSchedule, split_schedule
from trueline.ops.mla_decode.triton import attend_table
from trueline.ops.sparse_mla import IMPLEMENTATIONS
from trueline.ops.sparse_mla.kernels import look_up
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["triton"]

CHUNK = 2048
"""Entries of a list looked at together."""


@dataclass(frozen=True, slots=True)
class Prepared:
    table: Table
    schedules: dict[tuple[int, int], SplitSchedule] = field(default_factory=dict)
    """By heads and length of the lists: made by the first layer that asks, for all."""

    def schedule(self, heads: int, width: int, view: LatentView) -> SplitSchedule:
        if (heads, width) not in self.schedules:
            plan = launch_plan(heads, width, len(self.table.lengths), view)
            most = self.table.lengths.clamp(max=width).to(torch.int32)
            self.schedules[heads, width] = split_schedule(most, plan)
        return self.schedules[heads, width]


def launch_plan(heads: int, width: int, rows: int, view: LatentView) -> LaunchPlan:
    sms = num_sms(view.rows.device)
    return launch(heads, view.layout, view.dtype, sms, rows, width)


def prepare(rows: SparseRows | Table, view: LatentView, tiling: Tiling) -> Prepared:
    table = rows if isinstance(rows, Table) else Table.of(rows)
    return Prepared(table.to(view.rows.device))


def run(
    q: Tensor, view: LatentView, prepared: Prepared, positions: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    listed, schedule = lists(q.shape[1], view, prepared, positions)
    return attend_table(q, view, listed, 1, schedule, softmax_scale=softmax_scale)


def lists(
    heads: int, view: LatentView, prepared: Prepared, positions: Tensor
) -> tuple[DecodeTable, SplitSchedule]:
    """The chosen cells as blocks of one cell each, and the schedule over them."""
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
    return DecodeTable(counts, cells), prepared.schedule(heads, width, view)
