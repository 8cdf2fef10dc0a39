"""What numerics `published` round, against the reference's definition in float64: groups far apart,
zeros, numbers at the floors of scales, ties of bfloat16 and of both kinds of codes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trueline.ops.row_rounding import RowRounding
from trueline.reference import published
from trueline.verify import rounding
from trueline.verify.ops.data import randn, require

WIDTHS = ((15, 14), (79, 14), (150, 22), (512, 64))
"""Of a row, and how many of its channels rotate: whole groups and partial ones."""
INDEX_WIDTHS = (2, 16, 32, 64, 128)
HERE = published.Published()  # its weights play no part in what is rounded
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BAD = (math.inf, -math.inf, math.nan)


def hard_rows(width: int, dtype: torch.dtype) -> Tensor:
    """[12, width], strided."""
    rows = randn(12, width + 3, seed=width)[:, 1:-2]
    channel = torch.arange(width)
    rows[1] *= torch.exp2(18 * channel / width - 9)
    # so far apart that another group's scale has no digits left for them
    rows[2] *= torch.exp2(-18.0 * (channel // 64 % 2))
    rows[11] *= torch.exp2(-18.0 * (channel // 32 % 2))
    rows[3, : width // 2] = 0.0
    rows[4] = -0.0
    rows[5] *= 1e-7
    for row, largest in ((6, 1.75), (7, 3.0), (8, 448.0)):
        rows[row] *= largest / rows[row].abs().max()
    # ties of e4m3, beside a largest number that leaves them where they are
    rows[9] = channel * 37 % 256 / 16 * torch.where(channel % 2 == 0, 1.0, -1.0)
    rows[9, ::32] = 448.0
    rows[10] = torch.exp2(channel % 7 - 3.0) * (1 + (2 * channel % 256 + 1) / 512)  # of bfloat16
    return rows.to(dtype)


def tied_rows(width: int, dtype: torch.dtype) -> Tensor:
    """[14, width], of a width that is a square: half-way between two codes once they have met the
    Hadamard matrix, beside a 6."""
    wanted = torch.zeros(2 * len(MIDDLES), width)
    wanted[:, 0] = 6.0
    for row, middle in enumerate((*MIDDLES, *(-x for x in MIDDLES))):
        wanted[row, 1 + row % (width - 1)] = middle
    return (wanted @ published.hadamard(width) / math.sqrt(width)).to(dtype)


def row_rounding(
    op: RowRounding,
    dtype: torch.dtype = torch.float32,
    widths: Sequence[tuple[int, int]] = WIDTHS,
    index_widths: Sequence[int] = INDEX_WIDTHS,
) -> None:
    for width, rope in widths:
        rows = hard_rows(width, dtype)
        before, ours = rows.clone(), op.key(rows, rope=rope)
        exact = published.stored_key(HERE, rows.double(), rope)
        _same(f"keys of {width} channels, {rope} of them rotated", ours, exact, rows, before)
    for width in index_widths:
        what, rows = f"index rows of {width} channels", hard_rows(width, dtype)
        before, ours = rows.clone(), op.index(rows)
        near = rounding.index_rows_of(ours.double(), rows.double(), torch.zeros(len(rows), 1))
        require(bool(near.all()), f"{what}: {(~near).nonzero()[:, 0].tolist()} are others")
        require(ours.dtype == dtype and torch.equal(rows, before), f"{what}: dtype, or written")
        if math.isqrt(width) ** 2 == width:
            rows = tied_rows(width, dtype).view(2, -1, width)
            before, ours = rows.clone(), op.index(rows)
            exact = published.index_row(HERE, rows.double())
            _same(f"{what}, ties", ours, exact, rows, before)
    _bad_numbers(op, dtype)


def _same(what: str, ours: Tensor, exact: Tensor, rows: Tensor, before: Tensor) -> None:
    require(ours.shape == rows.shape and ours.dtype == rows.dtype, f"{what}: shape or dtype")
    require(torch.equal(rows, before), f"{what}: what was given is written")
    others = int((ours.double() != exact).sum())
    require(others == 0, f"row_rounding: {what}: {others} of {ours.numel()} numbers are others")


def _bad_numbers(op: RowRounding, dtype: torch.dtype) -> None:
    """They are seen in their group of a key, and everywhere in an index row."""
    for bad in BAD:
        rows = randn(2, 150).to(dtype)
        rows[1, 70] = bad
        wanted = torch.zeros(2, 150, dtype=torch.bool)
        wanted[1, 64:128] = True
        made = op.key(rows, rope=22), op.index(rows[:, 64:128])
        seen = torch.equal(made[0].isnan(), wanted) and torch.equal(
            made[1].isnan(), wanted[:, 64:128]
        )
        require(seen, f"row_rounding: {bad} is hidden, or spreads")


def row_rounding_bits(op: RowRounding) -> None:
    """A row's bits do not depend on the rows beside it."""
    for width, rope in WIDTHS:
        rows = randn(67, width, seed=width)
        whole = op.key(rows, rope=rope)
        _alike(whole, ((part, op.key(rows[part], rope=rope)) for part in _parts()))
    for width in INDEX_WIDTHS:
        rows = randn(67, 3, width, seed=width)
        whole = op.index(rows)
        _alike(whole, ((part, op.index(rows[part])) for part in _parts()))


def _parts() -> Iterator[slice]:
    yield from (slice(0, 1), slice(3, 5), slice(11, 42), slice(66, 67), slice(5, 5))


def _alike(whole: Tensor, parts: Iterator[tuple[slice, Tensor]]) -> None:
    for part, alone in parts:
        require(torch.equal(alone, whole[part]), f"row_rounding: bits of rows {part}")
