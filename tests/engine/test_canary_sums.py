"""Sums of places, compared with what they were: which have changed, and in which row."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from trueline.cache.parts import Part
from trueline.engine.canaries.places import Chosen
from trueline.engine.canaries.sums import Difference, Sums

LAYERS, PLACES, ROWS, WORDS = 2, 6, 4, 3
RATIO = 3
"""Positions of a row, as of compressed entries."""
POSITIONS = ROWS * RATIO


def memory() -> tuple[torch.Tensor, Sums]:
    values = torch.randn(LAYERS, PLACES, ROWS, WORDS, dtype=torch.float64)
    return values, Sums(Part.rows("rows", values, values), POSITIONS)


def chosen(known: int, written: int, first: int = 0, count: int = PLACES) -> Chosen:
    numbers = {"places": range(count), "first": first, "known": known, "written": written,
               "looked": 7}  # fmt: skip
    return Chosen(
        **{
            item.name: torch.tensor(list(each) if isinstance(each, range) else [each] * count)
            for item in fields(Chosen)
            for each in [numbers[item.name]]
        }
    )


def look(
    sums: Sums, known: int, written: int, first: int = 0, most: int = 1 << 20
) -> list[Difference]:
    found = list(sums.compare(chosen(known, written, first), most))
    return [each for part in found for each in sums.differences(part)]


@pytest.mark.parametrize("most", [1, 400, 1 << 20])
def test_each_row_of_each_place_and_layer(most: int) -> None:
    """However many places are added up at a time."""
    values, sums = memory()
    assert len(list(sums.compare(chosen(0, POSITIONS), most))) == -(-PLACES // max(most // 192, 1))
    for layer in range(LAYERS):
        for place in range(PLACES):
            for row in range(ROWS):
                values[layer, place, row, row % WORDS] += 1
                found = look(sums, POSITIONS, POSITIONS, most=most)
                assert found == [Difference(layer, place, row, (0, POSITIONS), 7)]
    assert look(sums, POSITIONS, POSITIONS, most=most) == []


def test_only_what_is_known_is_compared() -> None:
    """Of a row, all of its positions; nothing at all is known at first."""
    values, sums = memory()
    assert look(sums, 0, 5) == []
    values[1, 2, 1:] += 1  # of row 1 a position is missing
    assert look(sums, 5, POSITIONS) == []
    values[1, 2, 0] += 1
    assert [each.row for each in look(sums, POSITIONS, 6)] == [0]
    values[0, 3, 2:] = torch.nan
    assert look(sums, 6, POSITIONS) == []
    values[0, 3, 3] = 0
    assert [each.row for each in look(sums, POSITIONS, POSITIONS)] == [3]


def test_what_was_written_again_is_not_compared() -> None:
    """Though sums were kept of what was there before."""
    values, sums = memory()
    assert look(sums, 0, POSITIONS) == []
    values += 1
    assert look(sums, 0, POSITIONS) == []
    values[0, 4, 2] += 1
    assert [each.place for each in look(sums, POSITIONS, POSITIONS)] == [4]


def test_what_padding_writes_is_not_compared() -> None:
    """A position spoils the row it is in."""
    values, sums = memory()
    assert look(sums, 0, POSITIONS, first=1) == []
    values[:, :, 0] += 1
    assert look(sums, POSITIONS, POSITIONS, first=1) == []
    values[1, 4, 1] += 1
    (found,) = look(sums, POSITIONS, POSITIONS, first=1)
    assert (found.layer, found.place, found.row) == (1, 4, 1)
    values, sums = memory()
    look(sums, 0, POSITIONS, first=POSITIONS)
    values[:] += 1
    assert look(sums, POSITIONS, POSITIONS, first=POSITIONS) == []


@pytest.mark.parametrize("rows", [(0, 1), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3), (0, 3)])
@pytest.mark.parametrize("change", [1, 1 << 40, -(1 << 62)])
def test_several_rows_are_no_single_one(rows: tuple[int, ...], change: int) -> None:
    """Also where they change by the same, or swap."""
    values, sums = memory()
    look(sums, 0, POSITIONS)
    words = values.view(torch.int64)
    words[0, 1, list(rows), 0] += change
    (found,) = look(sums, POSITIONS, POSITIONS)
    assert (found.place, found.row) == (1, None)
    words[0, 1, list(rows)] = words[0, 1, list(reversed(rows))]
    (found,) = look(sums, POSITIONS, POSITIONS)
    assert (found.place, found.row) == (1, None)


@pytest.mark.parametrize("bit", range(64))
def test_a_bit_is_enough(bit: int) -> None:
    values, sums = memory()
    look(sums, 0, POSITIONS)
    values.view(torch.int64)[1, 5, 3, 2] ^= (1 << bit) if bit < 63 else -(1 << 63)
    assert look(sums, POSITIONS, POSITIONS) == [Difference(1, 5, 3, (0, POSITIONS), 7)]
