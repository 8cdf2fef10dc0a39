"""The last positions of compressed attention: a row each, key and value of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from trueline.cache.kinds import KindContext, PagedKind
from trueline.cache.kinds.compressed import compressed_layers, window_block
from trueline.cache.kinds.inputs import FixedRows, InputContext, KindInputs, blocks_of
from trueline.cache.kinds.latent import storage
from trueline.cache.layout import LatentLayout
from trueline.cache.rows import BatchRow
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.capabilities import Context, Opaque
from trueline.ops.registry import implementation
from trueline.ops.sink_attention import SinkRows, SinkRun, SinkTable
from trueline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class WindowInput:
    cells: Tensor  # [tokens] where each token's row goes
    attend: Opaque | None
    """What sink_attention made of the step, for layers that see nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(PagedKind[LatentView, WindowInput]):
    name: ClassVar[str] = "window"
    label: ClassVar[str | None] = "window"
    ops: ClassVar[tuple[str, ...]] = ("sink_attention", "sink_prepare", "row_rounding")
    writers: ClassVar[tuple[str, ...]] = ("sink_prepare",)
    layers: tuple[int, ...]
    size: int
    """Positions that a query sees, itself included."""
    alone: bool
    """Whether some layers see nothing else."""
    layout: LatentLayout
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> Window | None:
        layers = compressed_layers(spec)
        if not layers:
            return None
        first = next(iter(layers.values()))
        latent = first.head_dim - first.rope.dim
        layout = LatentLayout(
            latent,
            first.rope.dim,
            window_block(spec, context),
            storage(context.config, latent, context.compute),
        )
        return cls(
            layers=tuple(layers),
            size=first.window,
            alone=any(mixer.form == "window" for mixer in layers.values()),
            layout=layout,
            dtype=context.compute,
        )

    def __str__(self) -> str:
        each = self.layout.row_bytes(self.dtype.itemsize)
        return f"{self.size:,} positions, {each:,} bytes each and layer"

    @property
    def window(self) -> int | None:
        return self.size

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return LatentStore.block_bytes(self.layout, len(self.layers), self.dtype)

    def allocate(self, num_blocks: int) -> LatentStore:
        return LatentStore(self.layout, len(self.layers), num_blocks, self.dtype)

    def inputs(self, context: InputContext[LatentView]) -> WindowInputs:
        return WindowInputs(self, context)

    def tell(self, context: Context) -> Context:
        return replace(context, latent=self.layout)


class WindowInputs(KindInputs[SinkRows | SinkTable, WindowInput]):
    def __init__(self, kind: Window, context: InputContext[LatentView]) -> None:
        self.kind, self.context = kind, context
        name = context.implementations["sink_attention"]
        self.attention = implementation("sink_attention", name)

    def read(self, rows: Sequence[BatchRow]) -> SinkRows:
        group = self.context.group
        return SinkRows(tuple(SinkRun(row.tables[group], [], row.start, row.count) for row in rows))

    def read_fixed(self, fixed: FixedRows) -> SinkTable:
        blocks = blocks_of(fixed, self.context.group, self.kind.block_size)
        return SinkTable(blocks, None, fixed.lengths, fixed.tokens_per_row)

    def build(self, rows: SinkRows | SinkTable, cells: Sequence[Tensor]) -> WindowInput:
        attend = None
        if self.kind.alone:
            view, tiling = self.context.view, self.context.tiling
            attend = self.attention.prepare(rows, view, None, tiling, size=self.kind.size, ratio=0)
        return WindowInput(cells[self.context.group], attend)
