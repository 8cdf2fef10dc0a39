"""The kinds of stories. Each function tells one with exactly the wanted number of operations, or
raises `Unfit`, and is then asked again with other numbers."""

from __future__ import annotations

from trueline.tasks.draw import Draw
from trueline.tasks.kinds.collection import collection
from trueline.tasks.kinds.comparison import ages, comparison
from trueline.tasks.kinds.days import days
from trueline.tasks.kinds.groups import herd, left_over, parts, saving
from trueline.tasks.kinds.money import shop, spending, work
from trueline.tasks.kinds.places import boxes, ride
from trueline.tasks.kinds.story import Kind, Story, Unfit

__all__ = ["KINDS", "Story", "Unfit", "tell"]

KINDS: tuple[Kind, ...] = (
    *(collection, collection, collection, collection, collection),
    *(comparison, comparison, comparison, ages, days),
    *(shop, shop, spending, work, saving, boxes, boxes, ride, ride, parts, herd, left_over),
)
"""As often as they are told."""


def tell(draw: Draw, operations: int) -> Story:
    kind = draw.one(KINDS)
    while True:
        try:
            return kind(draw, operations)
        except Unfit:
            continue
