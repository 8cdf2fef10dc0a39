"""What compressors keep of each token until no entry needs it: per token, so that a step may be cut
anywhere, a prefix be shared, and drafts be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from trueline.cache.kinds import AnyPagedKind, KindContext, PagedKind
from trueline.cache.kinds.compressed import compressed_layers
from trueline.cache.kinds.entries import EntriesAll, EntriesIndex, EntriesSparse
from trueline.cache.kinds.inputs import FixedRows, InputContext, KindInputs, blocks_of
from trueline.cache.rows import BatchRow
from trueline.cache.tails import TailLayout, TailStore, TailView
from trueline.ops.capabilities import Opaque
from trueline.ops.compress import CompressRows, CompressRun, CompressTable
from trueline.ops.registry import implementation
from trueline.spec.mixer import CompressedSpec, CompressorSpec, Form
from trueline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class TailInput:
    cells: Tensor  # [tokens] where each token's row goes
    prepared: Opaque  # what compress made of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails(PagedKind[TailView, TailInput]):
    label: ClassVar[str | None] = "tails"
    ops: ClassVar[tuple[str, ...]] = ("compress",)
    writers: ClassVar[tuple[str, ...]] = ("compress",)
    form: ClassVar[Form]
    entries: ClassVar[type[AnyPagedKind]]
    """What is made of them."""
    layers: tuple[int, ...]
    layout: TailLayout

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> Self | None:
        layers = compressed_layers(spec, cls.form)
        if not layers:
            return None
        compressor = cls.compressor(next(iter(layers.values())))
        layout = TailLayout(
            compressor.dim, compressor.ratio, compressor.overlap, block_size=compressor.tail
        )
        return cls(layers=tuple(layers), layout=layout)

    @staticmethod
    def compressor(mixer: CompressedSpec) -> CompressorSpec:
        assert mixer.compressor is not None
        return mixer.compressor

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"{layout.slots} positions of {layout.row_bytes:,} bytes a sequence and layer "
            f"({self.name.removeprefix('tails_')}), an entry every {layout.ratio}"
        )

    @property
    def window(self) -> int | None:
        return self.layout.slots

    @property
    def window_step(self) -> int:
        return self.layout.ratio

    @property
    def keeps_ends(self) -> bool:
        return True

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def num_read(self, context: int) -> float:
        """By the token that completes a window: one of `ratio`."""
        return self.layout.slots / self.layout.ratio

    @property
    def block_bytes(self) -> int:
        return TailStore.block_bytes(self.layout, len(self.layers))

    def allocate(self, num_blocks: int) -> TailStore:
        return TailStore(self.layout, len(self.layers), num_blocks)

    def inputs(self, context: InputContext[TailView]) -> TailInputs:
        return TailInputs(self, context)


class TailsSparse(Tails):
    name = "tails_sparse"
    form = "sparse"
    entries = EntriesSparse


class TailsIndex(Tails):
    """Of the indexers' own compressors."""

    name = "tails_index"
    form = "sparse"
    entries = EntriesIndex

    @staticmethod
    def compressor(mixer: CompressedSpec) -> CompressorSpec:
        assert mixer.indexer is not None
        return mixer.indexer.compressor


class TailsAll(Tails):
    name = "tails_all"
    form = "all"
    entries = EntriesAll


class TailInputs(KindInputs[CompressRows | CompressTable, TailInput]):
    def __init__(self, kind: Tails, context: InputContext[TailView]) -> None:
        self.kind, self.context = kind, context
        self.compress = implementation("compress", context.implementations["compress"])
        _, self.entries = context.other(kind.entries)

    def read(self, rows: Sequence[BatchRow]) -> CompressRows:
        tails, entries = self.context.group, self.entries
        return CompressRows(
            tuple(
                CompressRun(row.tables[tails], row.tables[entries], row.start, row.count)
                for row in rows
            )
        )

    def read_fixed(self, fixed: FixedRows) -> CompressTable:
        return CompressTable(
            blocks_of(fixed, self.context.group, self.kind.block_size),
            fixed.lengths,
            fixed.tokens_per_row,
        )

    def build(self, rows: CompressRows | CompressTable, cells: Sequence[Tensor]) -> TailInput:
        prepared = self.compress.prepare(rows, self.context.view)
        return TailInput(cells[self.context.group], prepared)
