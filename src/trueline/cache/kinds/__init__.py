"""State kinds: what the layers of a model keep between steps, one file a kind.

A kind says which layers keep it, how it is laid out and stored, what it takes, allocates it, and
builds what its layers get of a step (inputs.py). A *paged* kind keeps something per token, in
blocks of `block_size` positions; kinds with the same block length and lifetime share a block table
(cache/groups.py). A *slotted* kind keeps something per sequence, in a slot.
Plan, memory, caches, steps, graphs, poison and reports go over the kinds of the model and name none
of them.

**Roll-back.** A step may compute drafts that are rejected. What a paged kind has of tokens after
the last accepted one is seen by no query and written again later. A slotted kind writes the
state after each token of such a row to a slot of its own (`StateSlots.drafts`), and the request
goes on from the one after the last accepted token.

**Ranks.** `of` sees the spec of one rank (spec/shard.py): a kind is divided as its mixers are.

**Canaries** (engine/canaries) guard a store that has `parts` (cache/parts.py).

Packages add kinds through the entry points `trueline.kinds` (docs/plugins.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar, cast

import torch

from trueline.cache.kinds.inputs import InputContext, KindInputs
from trueline.config import EngineConfig
from trueline.ops.capabilities import Context
from trueline.plugins import Registry
from trueline.spec.model import ModelSpec

View = TypeVar("View")
Input = TypeVar("Input")
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
        """NaN in blocks that nobody owns: a read of them shows in the results."""

    def poison_cells(self, cells: list[int]) -> None:
        """The same for single positions: the unwritten tail of a block."""

    def randomise(self, blocks: Sequence[int]) -> None:
        """For benchmarks and dry steps: contents that no request computed, without NaN."""


class SlottedStore(Protocol[View_co]):
    @property
    def views(self) -> Sequence[View_co]: ...

    def poison(self, slots: Iterable[int]) -> None: ...

    def randomise(self, slots: Sequence[int]) -> None: ...


class StateKind(ABC, Generic[View, Input]):
    name: ClassVar[str]
    label: ClassVar[str | None] = None
    """Of its line in the printed plan; `str(kind)` is the rest of the line."""
    ops: ClassVar[tuple[str, ...]] = ()
    """Ops that only layers with this kind use."""
    writers: ClassVar[tuple[str, ...]] = ()
    """Ops that write what it keeps; none where its layers do so themselves."""
    layers: tuple[int, ...]
    """The layers of the model that keep it."""

    @abstractmethod
    def inputs(self, context: InputContext[View]) -> KindInputs[Any, Input]:
        """The object that builds its layers' input of every step."""

    def tell(self, context: Context) -> Context:
        """The context with this kind's layout and dims added: implementations of ops may refuse
        them."""
        return context

    def costly_contexts(self, count: int) -> tuple[int, ...]:
        """Cached positions before `count` new ones with which a step may take the most memory,
        beside the longest."""
        return ()

    def of_layers(self, kept: Sequence[int]) -> Self:
        """The same of a model that has these layers only."""
        layers = tuple(new for new, old in enumerate(kept) if old in self.layers)
        return replace(self, layers=layers)  # type: ignore[type-var]


class PagedKind(StateKind[View, Input]):
    @property
    def window(self) -> int | None:
        """Positions that a query sees, itself included; None: all before it."""
        return None

    @property
    def window_step(self) -> int:
        """The window ends at the next multiple of it, and so moves by as many positions."""
        return 1

    @property
    def keeps_ends(self) -> bool:
        """Whether a step has what it writes itself at hand, and reads of the cache only what was
        there before. Then what is behind the window when it ends is not kept, unless a prefix may
        end there: those positions lie in the null block, which nobody need write."""
        return False

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Positions of a block. Kinds with the same length and window share a block table."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Of one block, over all layers."""

    def num_read(self, context: int) -> float:
        """Of a sequence with so many positions, those that a decode step must read."""
        return context if self.window is None else min(context, self.window)

    @abstractmethod
    def allocate(self, num_blocks: int) -> PagedStore[View]:
        """On the device that is torch's default."""


class SlottedKind(StateKind[View, Input]):
    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Of one slot, over all layers."""

    @abstractmethod
    def allocate(self, num_slots: int) -> SlottedStore[View]:
        """On the device that is torch's default."""


AnyKind: TypeAlias = StateKind[Any, Any]
AnyPagedKind: TypeAlias = PagedKind[Any, Any]
AnySlottedKind: TypeAlias = SlottedKind[Any, Any]


class LayerViews:
    """What one layer keeps, by kind."""

    def __init__(self, views: Mapping[str, object]) -> None:
        self._views = views

    def __getitem__(self, kind: type[StateKind[View, Any]]) -> View:
        return cast("View", self._views[kind.name])


REGISTRY = Registry(
    "trueline.kinds",
    "state kind",
    {
        "paged.entries_sparse": "trueline.cache.kinds.entries:EntriesSparse",
        "paged.entries_index": "trueline.cache.kinds.entries:EntriesIndex",
        "paged.entries_all": "trueline.cache.kinds.entries:EntriesAll",
        "paged.window": "trueline.cache.kinds.window:Window",
        "paged.tails_sparse": "trueline.cache.kinds.tails:TailsSparse",
        "paged.tails_index": "trueline.cache.kinds.tails:TailsIndex",
        "paged.tails_all": "trueline.cache.kinds.tails:TailsAll",
        "paged.latent": "trueline.cache.kinds.latent:Latent",
        "paged.index_keys": "trueline.cache.kinds.index_keys:IndexKeys",
        "slotted.lightning": "trueline.cache.kinds.lightning:LightningState",
    },
    dict.fromkeys(("paged", "slotted"), ("of", "allocate", "inputs")),
)


class KindClass(Protocol):
    ops: tuple[str, ...]

    def of(self, spec: ModelSpec, context: KindContext, /) -> AnyKind | None: ...


def find_kinds(spec: ModelSpec, context: KindContext) -> tuple[AnyKind, ...]:
    """Of this model: each registered class says by `of(spec, context)` whether layers keep it."""
    found = (cls.of(spec, context) for cls in _classes())
    return tuple(kind for kind in found if kind is not None)


def ops_of_kinds() -> set[str]:
    """Ops that only models with certain kinds use."""
    return {op for cls in _classes() for op in cls.ops}


def _classes() -> list[KindClass]:
    return [REGISTRY.get(how, name) for how in REGISTRY.needs for name in REGISTRY.names(how)]
