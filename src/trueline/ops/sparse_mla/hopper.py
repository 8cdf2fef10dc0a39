"""As triton.py, with `mla_decode`'s kernel for Hopper GPUs."""

from __future__ import annotations

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.mla_decode.hopper import attend_table
from trueline.ops.sparse_mla import IMPLEMENTATIONS
from trueline.ops.sparse_mla.triton import Prepared, lists, prepare

__all__ = ["capabilities", "prepare", "run"]

capabilities = IMPLEMENTATIONS["hopper"]


def run(
    q: Tensor, view: LatentView, prepared: Prepared, positions: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    listed, schedule = lists(q.shape[1], view, prepared, positions)
    return attend_table(q, view, listed, 1, schedule, softmax_scale=softmax_scale)
