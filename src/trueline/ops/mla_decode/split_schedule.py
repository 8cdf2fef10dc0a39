# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The split-KV schedule that programs walk, made on the device: lengths never come to the host, and
a captured graph serves any lengths. A split is a run of a row's tiles; a row of
several splits leaves a partial result for each, which a second kernel merges."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.mla_decode.launch_plan import LaunchPlan

CHUNK = 256
"""Rows looked at together."""
LONGER = 8
"""No row is split where the longest program then takes at most 1 / LONGER more time: nothing is
left to merge."""


@dataclass(frozen=True, slots=True)
class SplitSchedule:
    plan: LaunchPlan
    entries: Tensor  # [entries, 4]: row, first tile, tile after the last, partial or -1 if whole
    bounds: Tensor  # [groups + 1]: where each group's entries begin
    rows: Tensor  # [3, rows]: where the row's entries end, its first partial, its number of splits

    @property
    def partials(self) -> int:
        return self.plan.partials(self.rows.shape[1])


def split_schedule(lengths: Tensor, plan: LaunchPlan) -> SplitSchedule:
    """lengths [rows] int32: how many keys each row sees."""
    rows = len(lengths)
    entries = lengths.new_empty(plan.entries(rows), 4, dtype=torch.int32)
    bounds = lengths.new_empty(plan.groups + 1, dtype=torch.int32)
    table = lengths.new_empty(3, rows, dtype=torch.int32)
    schedule_splits[(plan.groups + 1,)](
        lengths, entries, bounds, table, rows, len(entries), plan.groups,
        TILE=plan.tile, OVERHEAD=plan.overhead, LEAST=plan.least, LONGER=LONGER, CHUNK=CHUNK,
    )  # fmt: skip
    return SplitSchedule(plan, entries, bounds, table)


@triton.jit
def tiles_of(lengths, row, rows, TILE: tl.constexpr):
    return tl.cdiv(tl.load(lengths + row, mask=row < rows, other=0), TILE).to(tl.int64)


@triton.jit
def group_at(unit, total, used):
    """Group k has units k·total/used up to (k+1)·total/used, rounded down."""
    return ((unit + 1) * used - 1) // total


@kernel(do_not_specialize=["rows", "capacity", "groups"])
def schedule_splits(
    lengths, entries, bounds, table, rows, capacity, groups,
    TILE: tl.constexpr, OVERHEAD: tl.constexpr, LEAST: tl.constexpr, LONGER: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A program per group writes the group's entries; one more, which has none, what is said of
    rows. A row's units are its overhead and then its tiles; rows without keys have none. Rows that
    are about as many as groups, and about as long as each other, have a group each."""
    pdl_wait()
    group = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    total = tl.zeros((), tl.int64)
    longest = tl.zeros((), tl.int64)
    alive = tl.zeros((), tl.int64)
    for chunk in range(0, rows, CHUNK):
        tiles = tiles_of(lengths, chunk + lane, rows, TILE)
        total += tl.sum(tl.where(tiles > 0, tiles + OVERHEAD, 0), 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        alive += tl.sum((tiles > 0).to(tl.int64), 0)
    used = tl.minimum(tl.maximum(total // LEAST, 1), groups)
    whole = (alive <= groups) & ((longest + OVERHEAD) * used * LONGER <= total * (LONGER + 1))
    total = tl.maximum(total, 1)
    begin, end = group * total // used, (group + 1) * total // used
    units = tl.zeros((), tl.int64)
    listed = tl.zeros((), tl.int64)
    partials_before = tl.zeros((), tl.int64)
    earlier = tl.zeros((), tl.int64)
    counted = tl.zeros((), tl.int64)
    for chunk in range(0, rows, CHUNK):
        row = chunk + lane
        tiles = tiles_of(lengths, row, rows, TILE)
        cost = tl.where(tiles > 0, tiles + OVERHEAD, 0)
        zero = units + tl.cumsum(cost, 0) - tiles  # the unit of a row's first tile
        there = (tiles > 0).to(tl.int64)
        own = counted + tl.cumsum(there, 0) - there
        first = tl.where(whole, own, group_at(zero, total, used))
        last = tl.where(whole, own, group_at(zero + tiles - 1, total, used))
        splits = tl.where(tiles > 0, last - first + 1, 0)
        unmerged = tl.where(splits > 1, splits, 0)
        entry = listed + tl.cumsum(splits, 0) - splits
        partial = partials_before + tl.cumsum(unmerged, 0) - unmerged
        if group == groups:
            tl.store(table + row, entry + splits, mask=row < rows)
            tl.store(table + rows + row, partial, mask=row < rows)
            tl.store(table + 2 * rows + row, splits, mask=row < rows)
        nth = group - first
        mine = (nth >= 0) & (nth < splits) & (entry + nth < capacity)
        to = entries + 4 * (entry + nth)
        tl.store(to, row, mask=mine)
        tl.store(to + 1, tl.where(whole, 0, tl.maximum(begin - zero, 0)), mask=mine)
        tl.store(to + 2, tl.where(whole, tiles, tl.minimum(end - zero, tiles)), mask=mine)
        tl.store(to + 3, tl.where(splits > 1, partial + nth, -1), mask=mine)
        earlier += tl.sum(tl.minimum(tl.maximum(nth, 0), splits), 0)
        counted += tl.sum(there, 0)
        units += tl.sum(cost, 0)
        listed += tl.sum(splits, 0)
        partials_before += tl.sum(unmerged, 0)
    tl.store(bounds + group, earlier)
