"""Products of options of which `make test` runs a diagonal, and `make test-full` all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """All combinations; slow but for as many as show every value of every axis."""
    lists = [list(axis) for axis in axes]
    quick = [
        tuple(place % len(axis) for axis in lists) for place in range(max(len(a) for a in lists))
    ]
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(lists, places, strict=True)),
            marks=[] if places in quick else [pytest.mark.slow],
        )
        for places in product(*(range(len(axis)) for axis in lists))
    ]


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """All combinations; slow but for few that show every pair of values of any two axes."""
    lists = [list(axis) for axis in axes]
    every = list(product(*(range(len(axis)) for axis in lists)))
    left = {pair for places in every for pair in _pairs(places)}
    quick: set[tuple[int, ...]] = set()
    while left:
        best = max(every, key=lambda places: sum(pair in left for pair in _pairs(places)))
        quick.add(best)
        left.difference_update(_pairs(best))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(lists, places, strict=True)),
            marks=[] if places in quick else [pytest.mark.slow],
        )
        for places in every
    ]


def _pairs(places: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(places), 2))
