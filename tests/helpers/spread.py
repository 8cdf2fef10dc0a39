"""Products of options of which `make test` runs a diagonal, and `make test-full` all."""

from __future__ import annotations

from collections import Counter
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


def pairwise(*axes: Iterable[Any], unpaired: tuple[int, int] | None = None) -> list[Any]:
    """All combinations; slow but for few that show every pair of values of any two axes, and all
    values about as often. `unpaired`: two axes whose pairs need not be shown."""
    lists = [list(axis) for axis in axes]
    every = list(product(*(range(len(axis)) for axis in lists)))

    def pairs(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        found = combinations(enumerate(places), 2)
        return {pair for pair in found if tuple(axis for axis, _ in pair) != unpaired}

    shown = {places: pairs(places) for places in every}
    left = set().union(*shown.values())
    quick: set[tuple[int, ...]] = set()
    used: Counter[tuple[int, int]] = Counter()
    while left:
        best = max(
            every,
            key=lambda places: (
                len(shown[places] & left),
                -sum(used[value] * len(lists[value[0]]) for value in enumerate(places)),
            ),
        )
        quick.add(best)
        used.update(enumerate(best))
        left -= shown[best]
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(lists, places, strict=True)),
            marks=[] if places in quick else [pytest.mark.slow],
        )
        for places in every
    ]
