"""The indexer's key of each token, in the layers that have an indexer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.kinds import KindContext, PagedKind
from trueline.cache.kinds.inputs import FixedRows, InputContext, KindInputs, blocks_of, places
from trueline.cache.kinds.latent import row_table
from trueline.cache.layout import IndexLayout
from trueline.cache.rows import BatchRow
from trueline.device import send
from trueline.errors import UsageError
from trueline.ops.capabilities import Context, Opaque
from trueline.ops.registry import implementation
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec

# The most index scores in memory at a time.
SCORES_AT_A_TIME = 1 << 25


@dataclass(frozen=True, slots=True)
class ChoosingRows:
    """The tokens that see more positions than the indexer lets through."""

    rows: SparseRows | Table
    at: Sequence[int] | slice
    """Where they stand among the step's tokens."""


@dataclass(slots=True, kw_only=True)
class IndexInput:
    cells: Tensor  # [tokens] where each token's key goes
    at: slice | Tensor  # where the tokens that choose stand among the step's
    lengths: Tensor  # [those]: how many positions each sees
    scores: tuple[tuple[slice, Opaque], ...]
    """What index_scores made of them, some rows at a time."""
    chosen: Tensor | None = None
    """Positions [those, topk] that the last layer with an indexer of its own chose."""

    @property
    def count(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKeys(PagedKind[IndexView, IndexInput]):
    name: ClassVar[str] = "index_keys"
    label: ClassVar[str | None] = "selection"
    ops: ClassVar[tuple[str, ...]] = ("index_write", "index_scores", "topk", "sparse_mla")
    writers: ClassVar[tuple[str, ...]] = ("index_write",)
    layers: tuple[int, ...]
    layout: IndexLayout
    topk: int
    ratio: ClassVar[int] = 1
    """Positions of a key."""

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> IndexKeys | None:
        """All indexers must have the same key width and topk."""
        indexers = {
            i: layer.mixer.indexer
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer is not None
        }
        if len({(indexer.head_dim, indexer.topk) for indexer in indexers.values()}) > 1:
            raise UsageError(f"{spec.family}: indexers of different widths or topk")
        own = {i: indexer for i, indexer in indexers.items() if not indexer.shared}
        if not own:
            return None
        first = next(iter(own.values()))
        layout = index_layout(context, first.head_dim, context.block_size)
        return cls(layers=tuple(own), layout=layout, topk=first.topk)

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"the {self.topk:,} best positions; keys in {layout.storage}, layout '{layout.kind}', "
            f"{layout.token_bytes} bytes a token and layer"
        )

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def num_read(self, context: int) -> float:
        """None where all of it is attended to."""
        return context if context > self.topk else 0

    @property
    def block_bytes(self) -> int:
        return IndexStore.block_bytes(self.layout, len(self.layers))

    def allocate(self, num_blocks: int) -> IndexStore:
        return IndexStore(self.layout, len(self.layers), num_blocks)

    def inputs(self, context: InputContext[IndexView]) -> IndexInputs:
        return IndexInputs(self, context)

    def tell(self, context: Context) -> Context:
        return replace(context, index=self.layout)


def index_layout(context: KindContext, dim: int, block_size: int) -> IndexLayout:
    """As the options ask for."""
    wanted, form = context.config.index_cache_dtype, context.config.index_cache_layout
    storage = str(context.compute).removeprefix("torch.") if wanted == "auto" else wanted
    return IndexLayout(dim, block_size, storage, "rows" if form == "auto" else form)


class Chosen(Protocol):
    """A kind of keys among which rows choose: one for every `ratio` positions."""

    @property
    def block_size(self) -> int: ...

    @property
    def topk(self) -> int: ...

    @property
    def ratio(self) -> int: ...


class IndexInputs(KindInputs[ChoosingRows, IndexInput]):
    def __init__(self, kind: Chosen, context: InputContext[IndexView]) -> None:
        self.kind, self.context = kind, context
        self.limits = ((kind.topk + 1) * kind.ratio - 1,)
        self.scores = implementation("index_scores", context.implementations["index_scores"])

    def read(self, rows: Sequence[BatchRow]) -> ChoosingRows:
        runs: list[Run] = []
        at: list[int] = []
        for row in rows:
            blocks = row.tables[self.context.group]
            run = Run(blocks, row.start + 1, row.count, self.kind.ratio)
            dense = run.num_seeing(self.kind.topk)
            if dense < row.count:
                runs.append(run.between(dense, row.count))
                at += range(row.tokens.start + dense, row.tokens.stop)
        return ChoosingRows(SparseRows(tuple(runs)), at)

    def read_fixed(self, fixed: FixedRows) -> ChoosingRows:
        if fixed.longest // self.kind.ratio <= self.kind.topk:
            return ChoosingRows(SparseRows(()), ())
        lengths = fixed.lengths if self.kind.ratio == 1 else fixed.lengths // self.kind.ratio
        blocks = blocks_of(fixed, self.context.group, self.kind.block_size)
        table = row_table(blocks, lengths, fixed.tokens_per_row)
        return ChoosingRows(table, slice(0, len(lengths)))

    def build(self, rows: ChoosingRows, cells: Sequence[Tensor]) -> IndexInput:
        at, device = rows.at, self.context.device
        return IndexInput(
            cells=cells[self.context.group],
            at=at if isinstance(at, slice) else places(at, device),
            lengths=self._lengths(rows.rows),
            scores=tuple(
                (
                    part,
                    self.scores.prepare(
                        each, self.context.view, self.context.tiling, topk=self.kind.topk
                    ),
                )
                for part, each in self._parts(rows.rows)
            ),
        )

    def _lengths(self, rows: SparseRows | Table) -> Tensor:
        if isinstance(rows, Table):
            return rows.lengths
        return send(torch.tensor(rows.lengths, dtype=torch.long), self.context.device)

    def _parts(self, rows: SparseRows | Table) -> list[tuple[slice, SparseRows | Table]]:
        if isinstance(rows, Table):
            return [(slice(0, len(rows.lengths)), rows)]
        return list(rows.parts(SCORES_AT_A_TIME)) if rows.runs else []
