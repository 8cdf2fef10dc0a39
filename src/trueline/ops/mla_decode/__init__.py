"""Absorbed latent attention over the paged cache: one query per row, any number of rows.

`prepare(rows, view, tiling)` once a step; `run(q [rows, heads, width], view, prepared,
softmax_scale=…)` per layer -> out [rows, heads, latent], lse [rows, heads] in natural log (-inf
where a row has no keys, whose output is zero). `softmax_scale` has no default.
"""

from __future__ import annotations

from dataclasses import dataclass

from trueline.cache.layout import LatentLayout


@dataclass(frozen=True, slots=True)
class Tiling:
    """How keys are cut: at multiples of `size` from position 0. `full` tiles only, padded with
    zero rows, make every product the same shape: what batch invariance needs."""

    size: int
    full: bool


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Each row's context: how many positions it sees, and the blocks that hold them."""

    lengths: list[int]
    block_ids: list[list[int]]

    def cells(self, row: int, layout: LatentLayout) -> list[int]:
        return layout.cells(self.block_ids[row], 0, self.lengths[row])
