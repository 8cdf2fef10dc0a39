"""What a short convolution keeps: the last `taps - 1` inputs of every channel, for each sequence.

The rows that a token's taps read lie in one pool: [all slots, `taps - 1` rows each | the step's
tokens | a row of zeros]. So a tap is an index into the pool, and the tail after a token is what all
but the first of its taps read. Decode rows, drafts and chunks of prompts differ in nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trueline.cache.kinds import KindContext, SlottedKind
from trueline.cache.kinds.inputs import Column, FixedRows, InputContext, KindInputs
from trueline.cache.parts import Part
from trueline.cache.rows import BatchRow
from trueline.cache.slots import NULL_SLOT
from trueline.device import send
from trueline.errors import UsageError
from trueline.spec.model import ModelSpec
from trueline_conv.spec import ConvSpec

ZEROS = -1
"""In place of the source of a sequence that has no tokens before."""


@dataclass(frozen=True, slots=True)
class ConvRows:
    """By token of the step, but for the last two."""

    offsets: Tensor  # its place in its row
    sources: Tensor  # the slot that its row starts from, or ZEROS
    written_at: Tensor  # tokens whose tail is kept
    slots: Tensor  # and where


@dataclass(frozen=True, slots=True)
class ConvInput:
    taps: Tensor  # [tokens, taps] rows of the pool
    written_at: Tensor
    slots: Tensor


class ConvStore:
    def __init__(self, layers: int, slots: int, rows: int, channels: int, dtype: torch.dtype):
        self.tails = torch.empty(layers, slots, rows, channels, dtype=dtype)
        self.views = list(self.tails)

    def parts(self) -> list[Part]:
        """For canaries."""
        return [Part.rows("rows", self.tails, self.tails)]

    def poison(self, slots: Iterable[int]) -> None:
        self.tails[:, list(slots)] = torch.nan

    def randomise(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.tails[:, slot].normal_()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvTail(SlottedKind[Tensor, ConvInput]):
    """A layer's view is [slots, taps - 1, channels]."""

    api_version: ClassVar[int] = 5
    name: ClassVar[str] = "conv_tail"
    label: ClassVar[str | None] = "conv tails"
    layers: tuple[int, ...]
    taps: int
    channels: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> ConvTail | None:
        found = {
            i: layer.mixer
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, ConvSpec)
        }
        if not found:
            return None
        if len({(mixer.taps, mixer.channels) for mixer in found.values()}) > 1:
            raise UsageError(f"{spec.family}: convolutions of different widths")
        first = next(iter(found.values()))
        return cls(
            layers=tuple(found),
            taps=first.taps,
            channels=first.channels.count,
            dtype=context.compute,
        )

    def __str__(self) -> str:
        return f"the last {self.taps - 1} inputs of {self.channels} channels"

    @property
    def slot_bytes(self) -> int:
        return len(self.layers) * (self.taps - 1) * self.channels * self.dtype.itemsize

    def allocate(self, num_slots: int) -> ConvStore:
        return ConvStore(len(self.layers), num_slots, self.taps - 1, self.channels, self.dtype)

    def inputs(self, context: InputContext[Tensor]) -> ConvInputs:
        return ConvInputs(self.taps, len(context.view), context.device)


class ConvInputs(KindInputs[ConvRows, ConvInput]):
    columns: ClassVar = {
        "sources": Column(torch.int64, ZEROS),
        "slots": Column(torch.int64, NULL_SLOT),
        "snapshots": Column(torch.int64, NULL_SLOT),
    }

    def __init__(self, taps: int, num_slots: int, device: torch.device) -> None:
        self.taps, self.num_slots, self.device = taps, num_slots, device

    def read(self, rows: Sequence[BatchRow]) -> ConvRows:
        written = [(row.tokens.start + i, slot) for row in rows for i, slot in _kept(row)]
        return ConvRows(
            self._tensor(i for row in rows for i in range(row.count)),
            self._tensor(_source(row) for row in rows for _ in range(row.count)),
            self._tensor(token for token, _ in written),
            self._tensor(slot for _, slot in written),
        )

    def read_fixed(self, fixed: FixedRows) -> ConvRows:
        slots, snapshots = fixed.columns["slots"], fixed.columns["snapshots"]
        tokens = torch.arange(len(slots), device=slots.device)
        return ConvRows(
            tokens % fixed.tokens_per_row,
            fixed.columns["sources"],
            torch.cat((tokens, tokens)),
            torch.cat((slots, snapshots)),
        )

    def values(self, rows: Sequence[BatchRow]) -> dict[str, list[int]]:
        made: dict[str, list[int]] = {"sources": [], "slots": [], "snapshots": []}
        for row in rows:
            assert row.state is not None
            snapshots = dict(row.state.snapshots)
            made["sources"] += [_source(row)] * row.count
            made["slots"] += [*row.state.drafts, row.state.slot]
            made["snapshots"] += [
                snapshots.get(row.start + i + 1, NULL_SLOT) for i in range(row.count)
            ]
        return made

    def build(self, rows: ConvRows, cells: Sequence[Tensor]) -> ConvInput:
        kept = self.taps - 1
        count = len(rows.offsets)
        tap = torch.arange(self.taps, device=rows.offsets.device)
        tokens = torch.arange(count, device=rows.offsets.device)
        before = rows.offsets[:, None] + tap  # from the tail's first row on
        in_tail = rows.sources[:, None] * kept + before
        zeros = self.num_slots * kept + count
        old = torch.where(rows.sources[:, None] == ZEROS, zeros, in_tail)
        new = self.num_slots * kept + tokens[:, None] - kept + tap
        return ConvInput(torch.where(before < kept, old, new), rows.written_at, rows.slots)

    def _tensor(self, numbers: Iterable[int]) -> Tensor:
        return send(torch.tensor(list(numbers), dtype=torch.long), self.device)


def _source(row: BatchRow) -> int:
    assert row.state is not None
    return ZEROS if row.state.source is None else row.state.source


def _kept(row: BatchRow) -> Iterator[tuple[int, int]]:
    """(token of the row, slot that takes the tail after it)."""
    assert row.state is not None
    yield row.count - 1, row.state.slot
    yield from enumerate(row.state.drafts)
    for position, slot in row.state.snapshots:
        yield position - row.start - 1, slot
