"""The memory of one rank between steps: a store for each state kind of the model."""

from __future__ import annotations

from typing import Any, TypeVar

from trueline.cache.kinds import LayerViews, PagedStore, SlottedStore, StateKind
from trueline.plan.plan import Plan

View = TypeVar("View")


class Caches:
    def __init__(self, plan: Plan, num_layers: int) -> None:
        self.paged: dict[str, PagedStore[Any]] = {}
        self.slotted: dict[str, SlottedStore[Any]] = {}
        with plan.device.torch:
            for paged in plan.paged:
                self.paged[paged.name] = paged.allocate(plan.num_blocks)
            for slotted in plan.slotted:
                assert plan.slots is not None
                self.slotted[slotted.name] = slotted.allocate(plan.slots.num_slots)
        kept: list[dict[str, Any]] = [{} for _ in range(num_layers)]
        for kind in plan.kinds:
            for layer, view in zip(kind.layers, self.store(kind).views, strict=True):
                kept[layer][kind.name] = view
        self.views = [LayerViews(views) for views in kept]

    def store(self, kind: StateKind[View]) -> PagedStore[View] | SlottedStore[View]:
        return self.paged[kind.name] if kind.name in self.paged else self.slotted[kind.name]

    def first(self, kind: type[StateKind[View]]) -> View:
        """The view of the first layer that keeps this kind: all have the same layout."""
        stores = self.paged if kind.name in self.paged else self.slotted
        view: View = stores[kind.name].views[0]
        return view

    def poison(self, blocks: list[int], cells: list[int], slots: list[int]) -> None:
        """NaN in what nobody owns: whoever reads it shows it."""
        for paged in self.paged.values():
            paged.poison(blocks)
            paged.poison_cells(cells)
        for slotted in self.slotted.values():
            slotted.poison(slots)
