"""The memory of one rank between steps: a store for each state kind of the model."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from trueline.cache.kinds import AnyKind, LayerViews, PagedStore, SlottedStore, StateKind
from trueline.engine.messages import Unowned
from trueline.plan.plan import Plan

View = TypeVar("View")


class Caches:
    def __init__(self, plan: Plan, num_layers: int) -> None:
        self.paged: dict[str, PagedStore[object]] = {}
        self.slotted: dict[str, SlottedStore[object]] = {}
        self.group_of: dict[str, int] = {}
        # behind the last place that anybody is given one more, which canaries guard: NaN for who
        # reads it
        guard = int(plan.canaries is not None)
        with plan.device.torch:
            for number, group in enumerate(plan.groups):
                for paged in group.kinds:
                    blocks = self.paged[paged.name] = paged.allocate(group.num_blocks + guard)
                    blocks.poison(range(group.num_blocks, group.num_blocks + guard))
                    self.group_of[paged.name] = number
            for slotted in plan.slotted:
                assert plan.slots is not None
                count = plan.slots.num_slots
                slots = self.slotted[slotted.name] = slotted.allocate(count + guard)
                slots.poison(range(count, count + guard))
        kept: list[dict[str, object]] = [{} for _ in range(num_layers)]
        for kind in plan.kinds:
            for layer, view in zip(kind.layers, self.store(kind).views, strict=True):
                kept[layer][kind.name] = view
        self.views = [LayerViews(views) for views in kept]

    def store(self, kind: AnyKind) -> PagedStore[object] | SlottedStore[object]:
        return self.paged[kind.name] if kind.name in self.paged else self.slotted[kind.name]

    def group(self, kind: AnyKind) -> int:
        """Whose block table it has; 0 for a kind without one."""
        return self.group_of.get(kind.name, 0)

    def first(self, kind: type[StateKind[View, Any]]) -> View:
        """The view of the first layer that keeps this kind: all have the same layout."""
        stores = self.paged if kind.name in self.paged else self.slotted
        return cast("View", stores[kind.name].views[0])

    def poison(self, unowned: Unowned) -> None:
        """NaN in what nobody owns: a read of it shows in the results."""
        for name, store in self.paged.items():
            group = self.group_of[name]
            store.poison(unowned.blocks[group])
            store.poison_cells(unowned.cells[group])
        for slotted in self.slotted.values():
            slotted.poison(unowned.slots)
