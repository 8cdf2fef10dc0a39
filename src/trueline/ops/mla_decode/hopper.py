"""The warp-specialised kernel for Hopper GPUs (hopper_kernels.py) in place of the portable one, for
every step of a model whose dims it takes. The split-KV schedule and the merge of the splits are
triton.py's."""

from __future__ import annotations

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.launch import can_copy, unit_stride
from trueline.ops.mla_decode import IMPLEMENTATIONS, DecodeTable
from trueline.ops.mla_decode.launch_plan import HOPPER_TILE, LaunchPlan
from trueline.ops.mla_decode.split_schedule import SplitSchedule
from trueline.ops.mla_decode.triton import Prepared, prepare
from trueline.ops.mla_decode.triton import attend_table as attend_with

__all__ = ["attend_table", "capabilities", "prepare", "run"]

capabilities = IMPLEMENTATIONS["hopper"]


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
) -> tuple[Tensor, Tensor]:
    """As triton.py's. Producer warps copy queries and cache rows asynchronously."""
    assert (schedule.plan.head_tile, schedule.plan.tile) == (HOPPER_TILE, HOPPER_TILE)
    assert view.layout.fp8 is None
    assert can_copy(view.rows)
    q = unit_stride(q)
    q = q if can_copy(q) else q.contiguous()
    return attend_with(
        q, view, table, block_size, schedule, softmax_scale=softmax_scale, kernel=_attend
    )


def _attend(
    arguments: tuple[object, ...], view: LatentView, block_size: int, plan: LaunchPlan
) -> None:
    from trueline.ops.mla_decode.hopper_kernels import (
        attend_warp_specialised,  # Gluon is not everywhere
    )

    attend_warp_specialised[(plan.programs,)](*arguments, plan.head_tiles, block_size)
