"""The latent cache in fp8, byte by byte: rows that were written are those that the description of
the layout makes, and are read as it says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.cache.layout import AMAX_FLOOR, FP8_STORAGES, LatentFp8, LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.latent_write.stored import store_row, stored_rows
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.verify.ops.data import L, R, randn, shuffled
from trueline.verify.ops.latent_fp8 import in_groups

BLOCKS = 9
GROUPS = (16, 5, L, 64)
"""Channels that share a scale: some are left over, all are one group."""
ROPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layouts() -> Iterator[LatentLayout]:
    sizes = (1, 3, 16)
    for storage in FP8_STORAGES:
        for i, group in enumerate(GROUPS):
            for j, rope in enumerate(ROPES):
                fp8 = LatentFp8(storage, rope, group, power_of_two=(i + j) % 2 == 1)
                yield LatentLayout(L, R, sizes[(i + j) % 3], fp8)


def hard_rows(dtype: torch.dtype) -> Tensor:
    """[n, L + R]: groups 2^12 apart, zeros of both signs, numbers that are no code, halfway between
    two and a power of two below the largest; the largest at the floor and next to it."""
    drawn = randn(9, L + R + 3, seed=5)[:, 1:-2]  # strided
    drawn[:, :L] *= in_groups(9, L)
    drawn[2, :L] = 0.0
    drawn[3, :L] = -0.0
    drawn[4, :L] = torch.arange(L) / 16.0 * torch.tensor([1.0, -1.0])[torch.arange(L) % 2]
    floor = torch.tensor(AMAX_FLOOR)
    for row, largest in ((5, floor), (6, floor.nextafter(floor * 2)), (7, floor.nextafter(-floor))):
        drawn[row, :L] *= largest / drawn[row, :L].abs().max()
    drawn[8, :L] = 448.0 * 2.0 ** -(torch.arange(L) % 24)
    return drawn.to(dtype)


def latent_cache(subject: Subject) -> None:
    latent_bytes_are_described()


def latent_bytes_are_described() -> None:
    """Bytes of rows, what is read of them, and that no other row is written. What nobody owns is
    NaN, the row for masked positions zero."""
    for layout in layouts():
        assert layout.fp8 is not None
        what = f"{layout.fp8}, blocks of {layout.block_size}"
        dtype = ROPES[layout.fp8.rope]
        rows = hard_rows(dtype)
        ours, exact = (LatentStore(layout, 2, BLOCKS, dtype) for _ in range(2))
        cells = torch.tensor(shuffled(BLOCKS * layout.block_size - 1, 3)[: len(rows)])
        rows = rows[: len(cells)]
        for store in (ours, exact):
            store.poison(range(BLOCKS))
        view = ours.views[1]
        view.write(cells, rows[:, :L], rows[:, L:])
        for cell, row in zip(cells.tolist(), rows.double(), strict=True):
            store_row(exact.views[1], cell, row[:L], row[L:])
        if not torch.equal(ours.rows, exact.rows):
            fail(what, "rows are not stored as described")
        read = view.gather(cells)
        if read.dtype != dtype or not torch.equal(read.double(), stored_rows(view, cells)):
            fail(what, "what is read is not what lies there")
        if not torch.equal(read[:, L:], rows[:, L:]):
            fail(what, "rotated keys are not those written")
        _unowned(what, view, cells)
        _unsound(what, view, cells[:1])


def _unowned(what: str, view: LatentView, cells: Tensor) -> None:
    free = torch.ones(view.zero_cell, dtype=torch.bool)
    free[cells] = False
    if not bool(view.gather(free.nonzero()[:, 0]).isnan().all()):
        fail(what, "what nobody owns is read as numbers")
    if bool(view.gather(torch.tensor([view.zero_cell])).any()):
        fail(what, "the row for masked positions is not zero")


def _unsound(what: str, view: LatentView, cell: Tensor) -> None:
    """An infinity or a NaN stays visible, in its group and no other."""
    for bad in (math.inf, math.nan):
        row = torch.ones(1, L + R, dtype=view.dtype)
        row[0, L - 1] = bad
        view.write(cell, row[:, :L], row[:, L:])
        assert view.layout.fp8 is not None
        group = view.layout.fp8.group
        wanted = torch.arange(L + R) // group == (L - 1) // group
        wanted[L:] = False
        if not torch.equal(view.gather(cell)[0].isnan(), wanted):
            fail(what, f"{bad} is not seen in its group alone")


def fail(what: str, found: str) -> None:
    raise CheckFailed(f"latent cache: {what}: {found}")
