"""The launch plan of split-KV decode: one owner for tiles, padding and the sizes that follow.

Rows are cut at multiples of `tile` keys and scheduled on `groups` in equal shares, in order: a
group takes the end of one row, some whole rows and the beginning of another; rows of like length
that are about as many as groups get one each (split_schedule.py). Each group is worked on by
`head_tiles` programs at the same time, so that what one of them reads is in L2 for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trueline import device
from trueline.cache.layout import LatentLayout
from trueline.ops.capabilities import Context
from trueline.ops.launch import power_of_two

# Shared memory of a program that keeps one multiprocessor to itself.
SHARED_BYTES = 220 << 10
# Of these, smaller tiles give every multiprocessor something to do.
FEW_ROWS = 4
SOME_ROWS = range(48, 96)
BRIEF = 2048
"""Positions of a short context."""
LEAST_DIM = 16
"""Of an MMA operand."""
WIDE = 64
"""Rows from which four warps share one MMA."""
HOPPER_TILE = 64
"""Heads, and keys, of a tile of the warp-specialised kernel."""
MMA_COLUMNS = 256
"""Of one warp-group MMA, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    heads: int
    head_tile: int
    """Heads that a program attends with; the last tile is padded."""
    tile: int
    groups: int
    warps: int = 4
    stages: int = 3
    overhead: int = 1
    """What beginning a row costs, in tiles."""
    least: int = 2
    """Tiles and overhead that are worth a group."""
    registers: int | None = None
    """Of a thread at most, so that more programs share a multiprocessor."""
    most_groups: int = 0
    """That this GPU has with any rows and contexts: one kernel merges the splits of all."""

    @property
    def max_splits(self) -> int:
        """Of a row, at most."""
        return max(self.groups, self.most_groups)

    @property
    def padded_heads(self) -> int:
        return -(-self.heads // self.head_tile) * self.head_tile

    @property
    def head_tiles(self) -> int:
        return self.padded_heads // self.head_tile

    def entries(self, rows: int) -> int:
        """Splits of rows: one each, and one more for every cut between two groups."""
        return rows + self.groups - 1 if rows else 0

    def partials(self, rows: int) -> int:
        """Splits of rows that are not whole: a cut makes two of one, whatever the contexts."""
        return min(self.entries(rows), 2 * (self.groups - 1))

    @property
    def programs(self) -> int:
        return self.groups * self.head_tiles


def launch(
    heads: int, layout: LatentLayout, dtype: torch.dtype, sms: int, rows: int, context: int
) -> LaunchPlan:
    """`rows` and `context`: the most that there can be."""
    width = power_of_two(layout.latent) + power_of_two(layout.rope)
    if dtype == torch.float32:  # no tensor cores: what fits into registers
        head_tile, tile, warps, stages, per_sm = 16, 16, 8, 1, 2
    elif heads <= 16 and rows <= FEW_ROWS:
        head_tile, tile, warps, stages, per_sm = 16, 16, 4, 3, 2
    elif heads <= 16:
        # each multiprocessor has few tiles: too few to fill a third stage
        brief = rows in SOME_ROWS and context <= BRIEF
        head_tile, tile, warps, stages, per_sm = 16, 32, 4, 2 if brief else 3, 2
    elif heads <= 32:
        head_tile, tile, warps, stages, per_sm = 32, 32, 8, 3, 1
    else:
        head_tile, tile, warps, stages, per_sm = 64, 64, 8, 2, 1
    while (
        tile > LEAST_DIM and _bytes(head_tile, tile, stages, width, dtype) * per_sm > SHARED_BYTES
    ):
        tile //= 2
    head_tiles = -(-heads // head_tile)
    most = max(sms * per_sm // head_tiles, 1)
    groups = min(most, max(rows * -(-context // tile), 1))
    alone = rows == 1 and head_tile == 64 and context <= BRIEF
    least = 1 if alone else 2
    return LaunchPlan(
        heads=heads,
        head_tile=head_tile,
        tile=tile,
        groups=groups,
        warps=warps,
        stages=stages,
        least=least,
        most_groups=most,
    )


def hopper_refusals(context: Context) -> list[str]:
    """Of hopper.py's kernel, whose tiles are those that `launch` gives with these dims."""
    refusals = device.hopper_refusals(context.compute_capability)
    if refusals or context.heads is None or context.latent is None:
        return refusals
    heads, layout = context.heads.count, context.latent
    if layout.fp8 is not None:
        return [f"reads latents as they are computed, not {layout.fp8.storage}"]
    if (layout.latent, layout.rope) != (2 * MMA_COLUMNS, HOPPER_TILE):
        widths = f"{layout.latent} + {layout.rope}"
        return [f"needs cache rows of {2 * MMA_COLUMNS} + {HOPPER_TILE} numbers, not {widths}"]
    if heads <= HOPPER_TILE // 2:
        return [f"works on {HOPPER_TILE} heads at a time: with {heads}, half or more is padding"]
    return []


def _bytes(head_tile: int, tile: int, stages: int, width: int, dtype: torch.dtype) -> int:
    """Of the queries and the tiles in flight; wide MMAs still read one more."""
    buffers = stages if head_tile >= WIDE and dtype.itemsize == 2 else max(stages - 1, 1)
    return (head_tile + buffers * tile) * width * dtype.itemsize
