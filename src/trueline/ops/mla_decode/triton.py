"""Rows are cut into splits of equal work for all multiprocessors (launch_plan.py); the schedule is
made on the device (split_schedule.py), and splits are merged in their order by a second kernel
(kernels.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_pointers import latent_places, latent_pointers
from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.mla_decode import IMPLEMENTATIONS, DecodeRows, DecodeTable, Tiling
from trueline.ops.mla_decode.kernels import attend, merge
from trueline.ops.mla_decode.launch_plan import LEAST_DIM, LaunchPlan, launch
from trueline.ops.mla_decode.split_schedule import SplitSchedule, split_schedule

capabilities = IMPLEMENTATIONS["triton"]

# Of the second kernel: programs that keep the machine busy, and numbers that each loads at once.
MANY = 1024
AT_ONCE = 4096


Kernel = Callable[[tuple[object, ...], LatentView, int, LaunchPlan], None]
"""Launches a kernel that attends: its arguments, the cache, the block size, the plan."""


@dataclass(frozen=True, slots=True)
class Prepared:
    table: DecodeTable
    schedule: SplitSchedule


def prepare(
    rows: DecodeRows | DecodeTable,
    view: LatentView,
    tiling: Tiling,
    heads: int,
    *,
    plan: LaunchPlan | None = None,
) -> Prepared:
    """Tiles are the launch plan's, which is made here if none is given: full ones are asked for
    only in the mode that is refused."""
    device = view.rows.device
    table = rows if isinstance(rows, DecodeTable) else rows.table(device)
    if plan is None:
        count, most = table.blocks.shape
        context = most * view.layout.block_size
        plan = launch(heads, view.layout, view.dtype, num_sms(device), count, context)
    return Prepared(table, split_schedule(table.lengths, plan))


def run(
    q: Tensor, view: LatentView, prepared: Prepared, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    table, block_size = prepared.table, view.layout.block_size
    return attend_table(q, view, table, block_size, prepared.schedule, softmax_scale=softmax_scale)


def attend_table(
    q: Tensor,
    view: LatentView,
    table: DecodeTable,
    block_size: int,
    schedule: SplitSchedule,
    *,
    softmax_scale: float,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor]:
    """`block_size`: how many cells a number of the table stands for."""
    plan, layout = schedule.plan, view.layout
    rows, heads, latent = len(q), plan.heads, layout.latent
    assert q.shape[1:] == (heads, layout.width)
    q = unit_stride(q)
    out = q.new_empty(rows, heads, latent)
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    if not rows:
        return out, lse
    covered = plan.head_tiles * plan.head_tile
    partial_out = q.new_empty(schedule.partials, covered, latent, dtype=torch.float32)
    partial_lse = q.new_empty(schedule.partials, covered, dtype=torch.float32)
    capacity = len(schedule.entries)
    L = max(power_of_two(latent), LEAST_DIM)
    cached, *_ = latent_pointers(view)
    arguments = (
        q, cached, table.blocks, table.lengths, schedule.entries, schedule.bounds, out, lse,
        partial_out, partial_lse, softmax_scale * math.log2(math.e), heads, *q.stride()[:2],
        table.blocks.stride(0), capacity, schedule.partials,
    )  # fmt: skip
    (kernel or _portable)(arguments, view, block_size, plan)
    columns = L if rows * heads >= MANY else min(L, 128)
    merge[(rows, heads, -(-latent // columns))](
        partial_out, partial_lse, schedule.rows, out, lse, rows, heads, covered, capacity,
        schedule.partials,
        LATENT=latent, SPLITS=power_of_two(plan.max_splits), AT_ONCE=max(AT_ONCE // columns, 1),
        COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out, lse


def _portable(
    arguments: tuple[object, ...], view: LatentView, block_size: int, plan: LaunchPlan
) -> None:
    layout, (_, scales, keys) = view.layout, latent_pointers(view)
    L, R = (max(power_of_two(dim), LEAST_DIM) for dim in (layout.latent, layout.rope))
    attend[(plan.programs,)](
        *arguments, scales, keys, **latent_places(view), LATENT=layout.latent, ROPE=layout.rope,
        L=L, R=R, H=plan.head_tile, HEAD_TILES=plan.head_tiles, TILE=plan.tile, BLOCK=block_size,
        STAGES=plan.stages, num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
    )  # fmt: skip
