"""The recurrent state of linear attention: a matrix per head and sequence, on this rank's heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.kinds import KindContext, SlottedKind
from trueline.cache.kinds.inputs import Column, FixedRows, InputContext, KindInputs, places
from trueline.cache.rows import BatchRow
from trueline.cache.state import SlotShape, StateStore, StateView
from trueline.errors import UsageError
from trueline.ops.capabilities import Opaque
from trueline.ops.lightning import PrefillParts, StateRow, StateTable
from trueline.ops.registry import implementation
from trueline.spec.mixer import LightningSpec
from trueline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """A row with drafts takes a decode step for each of its tokens, one after the other: what the
    first leaves is what the second starts from."""

    decode: Sequence[tuple[Sequence[int] | slice, list[StateRow] | StateTable]]
    """The first tokens of decode rows and where they stand among the step's, then the second ones,
    ..."""
    prefill: PrefillParts = ()


@dataclass(frozen=True, slots=True)
class RecurrentInput:
    decode: tuple[tuple[slice | Tensor, Opaque], ...]  # what lightning made of each
    prefill: Opaque | None  # and of the prefill rows, if there are any


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningState(SlottedKind[StateView, RecurrentInput]):
    name: ClassVar[str] = "lightning"
    label: ClassVar[str | None] = "states"
    ops: ClassVar[tuple[str, ...]] = ("lightning", "qkv_prepare", "gated_norm")
    writers: ClassVar[tuple[str, ...]] = ("lightning",)
    layers: tuple[int, ...]
    heads: int
    dim: int
    """Of keys and of values."""
    dtype: torch.dtype
    tail: int
    """Positions whose keys and values are kept beside a state: bits must not depend on cuts."""

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> LightningState | None:
        layers = {
            i: layer.mixer
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, LightningSpec)
        }
        if not layers:
            return None
        first = next(iter(layers.values()))
        if any(mixer.cache_fields != first.cache_fields for mixer in layers.values()):
            raise UsageError(f"{spec.family}: linear layers with states of different widths")
        wanted = context.config.mamba_cache_dtype
        return cls(
            layers=tuple(layers),
            heads=first.heads.count,
            dim=first.head_dim,
            dtype=context.weights if wanted == "auto" else DTYPES[wanted],
            tail=context.tile,
        )

    def __str__(self) -> str:
        return f"{self.slot_bytes / 1e6:,.2f} MB a slot in {self.dtype}".replace("torch.", "")

    @property
    def slot_bytes(self) -> int:
        return StateStore.slot_bytes(len(self.layers), **self._shape())

    def allocate(self, num_slots: int) -> StateStore:
        return StateStore(len(self.layers), num_slots, **self._shape())

    def _shape(self) -> SlotShape:
        return SlotShape(
            heads=self.heads, dk=self.dim, dv=self.dim, dtype=self.dtype, tail=self.tail
        )

    def inputs(self, context: InputContext[StateView]) -> RecurrentInputs:
        return RecurrentInputs(context)


class RecurrentInputs(KindInputs[RecurrentRows, RecurrentInput]):
    columns: ClassVar = dict.fromkeys(StateTable.COLUMNS, Column(torch.int32))

    def __init__(self, context: InputContext[StateView]) -> None:
        self.device = context.device
        self.lightning = implementation("lightning", context.implementations["lightning"])

    def read(self, rows: Sequence[BatchRow]) -> RecurrentRows:
        decode = [row for row in rows if row.is_decode]
        steps = [list(state_rows(row)) for row in decode]
        return RecurrentRows(
            decode=[
                (
                    [row.tokens.start + j for row in decode if row.count > j],
                    [each[j] for each in steps if len(each) > j],
                )
                for j in range(max(map(len, steps), default=0))
            ],
            prefill=[(row.tokens, state_row(row)) for row in rows if not row.is_decode],
        )

    def read_fixed(self, fixed: FixedRows) -> RecurrentRows:
        columns, each = fixed.columns, fixed.tokens_per_row
        count = len(columns["slots"])
        tables = (
            StateTable(**{name: column[j::each].contiguous() for name, column in columns.items()})
            for j in range(each)
        )
        return RecurrentRows([(slice(j, count, each), table) for j, table in enumerate(tables)])

    def values(self, rows: Sequence[BatchRow]) -> dict[str, list[int]]:
        return StateTable.columns([each for row in rows for each in state_rows(row)])

    def build(self, rows: RecurrentRows, cells: Sequence[Tensor]) -> RecurrentInput:
        prepare = self.lightning.prepare_prefill
        return RecurrentInput(
            tuple(
                (
                    at if isinstance(at, slice) else places(at, self.device),
                    self.lightning.prepare(self._on_device(each)),
                )
                for at, each in rows.decode
            ),
            prepare(rows.prefill) if rows.prefill else None,
        )

    def _on_device(self, rows: list[StateRow] | StateTable) -> list[StateRow] | StateTable:
        if isinstance(rows, StateTable) or self.device.type == "cpu":
            return rows
        return StateTable.of(rows, self.device)


def state_row(row: BatchRow) -> StateRow:
    state = row.state
    assert state is not None, "the scheduler gives every row a slot"
    return StateRow(row.start, state.source, state.slot, state.snapshots)


def state_rows(row: BatchRow) -> Iterator[StateRow]:
    """A decode row token by token: with drafts, each state goes to a slot of its own."""
    state = row.state
    assert state is not None, "the scheduler gives every row a slot"
    source, snapshots = state.source, dict(state.snapshots)
    for j, slot in enumerate((*state.drafts, state.slot)):
        at = row.start + j
        kept = ((at + 1, snapshots[at + 1]),) if at + 1 in snapshots else ()
        yield StateRow(at, source, slot, kept)
        source = slot
