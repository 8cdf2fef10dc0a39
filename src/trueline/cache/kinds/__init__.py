"""State kinds: what the layers of a model keep between steps, one file a kind.

A kind says which layers keep it, how it is laid out and stored, what it takes, and allocates it. A
*paged* kind keeps something per token, in blocks of `block_size` positions; kinds with the same
block length and window share a block table (cache/groups.py). A *slotted* kind keeps something per
sequence, in a slot.
Plan, memory, caches, poison and reports go over the kinds of the model and name none of them.

Packages add kinds through the entry points `trueline.kinds` (docs/plugins.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch

from trueline.config import EngineConfig
from trueline.plugins import Registry
from trueline.spec.model import ModelSpec

View = TypeVar("View")
View_co = TypeVar("View_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindContext:
    """What decides how a kind is stored."""

    config: EngineConfig
    compute: torch.dtype
    weights: torch.dtype
    """The model's own dtype."""
    block_size: int
    tile: int
    """Positions of a tile where bits must not depend on the schedule; 0 elsewhere."""


class PagedStore(Protocol[View_co]):
    @property
    def views(self) -> Sequence[View_co]:
        """Of the kind's layers, in their order."""

    def poison(self, blocks: Iterable[int]) -> None:
        """NaN in blocks that nobody owns: whoever reads them shows it."""

    def poison_cells(self, cells: list[int]) -> None:
        """The same for single positions: the unwritten tail of a block."""

    def randomise(self, blocks: Sequence[int]) -> None:
        """For benchmarks and dry steps: contents that no request computed, without NaN."""


class SlottedStore(Protocol[View_co]):
    @property
    def views(self) -> Sequence[View_co]: ...

    def poison(self, slots: Iterable[int]) -> None: ...

    def randomise(self, slots: Sequence[int]) -> None: ...


class StateKind(ABC, Generic[View]):
    name: ClassVar[str]
    label: ClassVar[str | None] = None
    """Of its line in the printed plan; `str(kind)` is the rest of the line."""
    layers: tuple[int, ...]
    """Those of the model that keep it."""

    def of_layers(self, kept: Sequence[int]) -> Self:
        """The same of a model that has these layers only."""
        layers = tuple(new for new, old in enumerate(kept) if old in self.layers)
        return replace(self, layers=layers)  # type: ignore[type-var]


class PagedKind(StateKind[View]):
    window: ClassVar[int | None] = None
    """Positions that a query sees, itself included; None: all before it."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Positions of a block. Kinds with the same length and window share a block table."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Of one block, over all layers."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> PagedStore[View]:
        """On the device that is torch's default."""


class SlottedKind(StateKind[View]):
    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Of one slot, over all layers."""

    @abstractmethod
    def allocate(self, num_slots: int) -> SlottedStore[View]:
        """On the device that is torch's default."""


class LayerViews:
    """What one layer keeps, by kind."""

    def __init__(self, views: Mapping[str, Any]) -> None:
        self._views = views

    def __getitem__(self, kind: type[StateKind[View]]) -> View:
        view: View = self._views[kind.name]
        return view

    def get(self, kind: type[StateKind[View]]) -> View | None:
        return self._views.get(kind.name)


REGISTRY = Registry(
    "trueline.kinds",
    "state kind",
    {
        "paged.latent": "trueline.cache.kinds.latent:Latent",
        "paged.index_keys": "trueline.cache.kinds.index_keys:IndexKeys",
        "slotted.lightning": "trueline.cache.kinds.lightning:LightningState",
    },
    dict.fromkeys(("paged", "slotted"), ("of", "allocate")),
)


def find_kinds(spec: ModelSpec, context: KindContext) -> tuple[StateKind[Any], ...]:
    """Of this model: each registered class says by `of(spec, context)` whether layers keep it."""
    classes = [REGISTRY.get(how, name) for how in REGISTRY.needs for name in REGISTRY.names(how)]
    found = (cls.of(spec, context) for cls in classes)
    return tuple(kind for kind in found if kind is not None)
