"""Compressed entries: a row for every `ratio` positions, and the indexer's keys of them. A block of
B positions holds B / ratio of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.kinds import KindContext, PagedKind, PagedStore
from trueline.cache.kinds.compressed import compressed_layers, entry_block
from trueline.cache.kinds.index_keys import IndexInput, IndexInputs, index_layout
from trueline.cache.kinds.inputs import (
    Column,
    FixedRows,
    InputContext,
    KindInputs,
    blocks_of,
    places,
)
from trueline.cache.kinds.latent import storage
from trueline.cache.kinds.window import Window
from trueline.cache.layout import IndexLayout, LatentLayout
from trueline.cache.parts import Guarded, Part
from trueline.cache.rows import BatchRow
from trueline.cache.store import LatentStore, LatentView
from trueline.device import send
from trueline.ops.capabilities import Context, Opaque
from trueline.ops.compress import CompressRows, CompressRun
from trueline.ops.registry import implementation
from trueline.ops.sink_attention import SinkRows, SinkRun, SinkTable
from trueline.ops.sparse_rows import Run
from trueline.spec.mixer import Form
from trueline.spec.model import ModelSpec

View = TypeVar("View")


class EntryStore(Generic[View]):
    """A store whose rows are entries: what it is told of positions it does to them. One that is
    not complete has not been written."""

    def __init__(self, store: PagedStore[View], ratio: int) -> None:
        self.store, self.ratio = store, ratio
        self.views = store.views

    def parts(self) -> Sequence[Part]:
        assert isinstance(self.store, Guarded), "ours are"
        return self.store.parts()

    def poison(self, blocks: Iterable[int]) -> None:
        self.store.poison(blocks)

    def poison_cells(self, cells: list[int]) -> None:
        self.store.poison_cells(sorted({cell // self.ratio for cell in cells}))

    def randomise(self, blocks: Sequence[int]) -> None:
        self.store.randomise(blocks)


@dataclass(frozen=True, slots=True)
class AttendingRows:
    """Some of a step's tokens, and where they stand among all."""

    rows: SinkRows | SinkTable
    at: Sequence[int] | slice


@dataclass(frozen=True, slots=True)
class EntryRows:
    cells: Tensor  # [entries] where those that the step makes go
    positions: Tensor  # [entries] at which they are rotated
    seeing: AttendingRows | None
    """Tokens that attend to every entry that they see."""
    choosing: AttendingRows | None
    """Tokens that attend to those that they choose."""


@dataclass(frozen=True, slots=True)
class AttendInput:
    at: slice | Tensor  # where the tokens stand among the step's
    prepared: Opaque  # what sink_attention made of them


@dataclass(slots=True, kw_only=True)
class EntryInput:
    cells: Tensor  # [entries] where those that the step makes go
    positions: Tensor  # [entries] at which they are rotated
    seeing: AttendInput | None
    choosing: AttendInput | None
    rope: tuple[Tensor, Tensor] | None = None
    """cos and sin at `positions`: looked up by the first layer that needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries(PagedKind[LatentView, EntryInput]):
    label: ClassVar[str | None] = "entries"
    ops: ClassVar[tuple[str, ...]] = ("compress",)
    writers: ClassVar[tuple[str, ...]] = ("compress",)
    form: ClassVar[Form]
    layers: tuple[int, ...]
    layout: LatentLayout
    """Of entries."""
    dtype: torch.dtype
    ratio: int
    size: int
    """Of the window beside them."""
    topk: int | None
    """Entries that a token attends to; None: all that it sees."""

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> Self | None:
        layers = compressed_layers(spec, cls.form)
        if not layers:
            return None
        first = next(iter(layers.values()))
        assert first.compressor is not None
        ratio, latent = first.compressor.ratio, first.head_dim - first.rope.dim
        layout = LatentLayout(
            latent,
            first.rope.dim,
            entry_block(spec, context) // ratio,
            storage(context.config, latent, context.compute),
        )
        return cls(
            layers=tuple(layers),
            layout=layout,
            dtype=context.compute,
            ratio=ratio,
            size=first.window,
            topk=first.indexer.topk if first.indexer else None,
        )

    def __str__(self) -> str:
        each = self.layout.row_bytes(self.dtype.itemsize)
        seen = "all" if self.topk is None else f"the {self.topk:,} best"
        return f"one for {self.ratio} positions, {each:,} bytes each and layer; {seen} attended to"

    @property
    def block_size(self) -> int:
        return self.layout.block_size * self.ratio

    def num_read(self, context: int) -> float:
        return context if self.topk is None else min(context, self.topk * self.ratio)

    @property
    def block_bytes(self) -> int:
        return LatentStore.block_bytes(self.layout, len(self.layers), self.dtype)

    def allocate(self, num_blocks: int) -> EntryStore[LatentView]:
        store = LatentStore(self.layout, len(self.layers), num_blocks, self.dtype)
        return EntryStore(store, self.ratio)

    def inputs(self, context: InputContext[LatentView]) -> EntryInputs:
        return EntryInputs(self, context)


class EntriesSparse(Entries):
    name = "entries_sparse"
    form = "sparse"


class EntriesAll(Entries):
    name = "entries_all"
    form = "all"


class EntryInputs(KindInputs[EntryRows, EntryInput]):
    columns: ClassVar = {"cells": Column(torch.int64), "positions": Column(torch.int64)}
    """Of the entry that a token completes; others have the null block's first cell."""

    def __init__(self, kind: Entries, context: InputContext[LatentView]) -> None:
        self.kind, self.context = kind, context
        name = context.implementations["sink_attention"]
        self.attention = implementation("sink_attention", name)
        self.window, self.window_group = context.other(Window)
        if kind.topk is not None:
            self.limits = ((kind.topk + 1) * kind.ratio - 1,)

    def read(self, rows: Sequence[BatchRow]) -> EntryRows:
        """Tokens that see more entries than they may attend to choose among them, however they were
        scheduled."""
        group, kind = self.context.group, self.kind
        runs: tuple[list[SinkRun], list[SinkRun]] = [], []
        at: tuple[list[int], list[int]] = [], []
        for row in rows:
            blocks = row.tables[group]
            seen = Run(blocks, row.start + 1, row.count, kind.ratio)
            cut = row.count if kind.topk is None else seen.num_seeing(kind.topk)
            for part, (start, stop) in enumerate(((0, cut), (cut, row.count))):
                if start < stop:
                    window = row.tables[self.window_group]
                    runs[part].append(SinkRun(window, blocks, row.start + start, stop - start))
                    at[part].extend(range(row.tokens.start + start, row.tokens.start + stop))
        seeing, choosing = (
            AttendingRows(SinkRows(tuple(run)), places) if run else None
            for run, places in zip(runs, at, strict=True)
        )
        return EntryRows(*self._made(self._runs(rows)), seeing, choosing)

    def read_fixed(self, fixed: FixedRows) -> EntryRows:
        """Where some token may see more than it may attend to, all choose: those that see less take
        all of it."""
        window = blocks_of(fixed, self.window_group, self.window.layout.block_size)
        blocks = blocks_of(fixed, self.context.group, self.kind.block_size)
        lengths, each = fixed.lengths, fixed.tokens_per_row
        table = SinkTable(window, blocks, lengths, each)
        everything = AttendingRows(table, slice(0, len(lengths)))
        made = fixed.columns["cells"], fixed.columns["positions"]
        if self.kind.topk is not None and fixed.longest // self.kind.ratio > self.kind.topk:
            return EntryRows(*made, None, everything)
        return EntryRows(*made, everything, None)

    def values(self, rows: Sequence[BatchRow]) -> Mapping[str, Sequence[int]]:
        runs = self._runs(rows)
        made = zip(*(each.tolist() for each in self._made(runs)), strict=True)
        each = [
            next(made) if (position + 1) % self.kind.ratio == 0 else (0, 0)
            for run in runs.runs
            for position in range(run.start, run.stop)
        ]
        return {"cells": [cell for cell, _ in each], "positions": [at for _, at in each]}

    def _runs(self, rows: Sequence[BatchRow]) -> CompressRows:
        group = self.context.group
        return CompressRows(
            tuple(CompressRun([], row.tables[group], row.start, row.count) for row in rows)
        )

    def _made(self, runs: CompressRows) -> tuple[Tensor, Tensor]:
        """Cells and positions of the entries that these complete, on the host."""
        kind = self.kind
        cells = runs.entry_cells(kind.ratio, kind.layout.block_size)
        return cells, runs.entry_positions(kind.ratio)

    def build(self, rows: EntryRows, cells: Sequence[Tensor]) -> EntryInput:
        device = self.context.device
        return EntryInput(
            cells=send(rows.cells, device),
            positions=send(rows.positions, device),
            seeing=self._attending(rows.seeing),
            choosing=self._attending(rows.choosing),
        )

    def _attending(self, some: AttendingRows | None) -> AttendInput | None:
        if some is None:
            return None
        context, kind = self.context, self.kind
        prepared = self.attention.prepare(
            some.rows, self.window, context.view, context.tiling, size=kind.size, ratio=kind.ratio
        )
        at = some.at if isinstance(some.at, slice) else places(some.at, context.device)
        return AttendInput(at, prepared)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesIndex(PagedKind[IndexView, IndexInput]):
    """What the indexer scores: a key for each entry."""

    name: ClassVar[str] = "entries_index"
    label: ClassVar[str | None] = "selection"
    ops: ClassVar[tuple[str, ...]] = ("index_scores", "topk")
    writers: ClassVar[tuple[str, ...]] = ("compress",)
    layers: tuple[int, ...]
    layout: IndexLayout
    ratio: int
    topk: int

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> EntriesIndex | None:
        layers = compressed_layers(spec, "sparse")
        if not layers:
            return None
        indexer = next(iter(layers.values())).indexer
        assert indexer is not None
        ratio = indexer.compressor.ratio
        size = entry_block(spec, context) // ratio
        layout = index_layout(context, indexer.head_dim, size)
        return cls(layers=tuple(layers), layout=layout, ratio=ratio, topk=indexer.topk)

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"the {self.topk:,} best entries; keys in {layout.storage}, layout '{layout.kind}', "
            f"{layout.token_bytes} bytes an entry and layer"
        )

    @property
    def block_size(self) -> int:
        return self.layout.block_size * self.ratio

    def num_read(self, context: int) -> float:
        """None where all entries are attended to."""
        return context if context // self.ratio > self.topk else 0

    @property
    def block_bytes(self) -> int:
        return IndexStore.block_bytes(self.layout, len(self.layers))

    def allocate(self, num_blocks: int) -> EntryStore[IndexView]:
        return EntryStore(IndexStore(self.layout, len(self.layers), num_blocks), self.ratio)

    def inputs(self, context: InputContext[IndexView]) -> IndexInputs:
        return IndexInputs(self, context)

    def tell(self, context: Context) -> Context:
        return replace(context, index=self.layout)
