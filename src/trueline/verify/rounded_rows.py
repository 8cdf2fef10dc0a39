"""What a running engine keeps of DeepSeek V4 where it is rounded, by numerics `published` or by a
cache in fp8, and the reference over just that.

Two computations of one row may differ in the last bit, and so by a whole code; of index rows, by
another selection. So the reference attends to the rows that the engine stored, and to the entries
that it chose. It holds each row against its own, which must round to that row but for an error of
float32 before the rounding; and all but a few choices against its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.kinds.entries import EntriesAll, EntriesIndex, EntriesSparse
from trueline.cache.kinds.window import Window
from trueline.cache.layout import cells
from trueline.cache.rows import BatchRow
from trueline.cache.store import LatentView
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.runner import Runner
from trueline.ops.capabilities import PUBLISHED
from trueline.reference import compressor, published
from trueline.reference.functional import Params
from trueline.verify import bounds, rounding
from trueline.verify.failed import CheckFailed

FLOAT32 = 2e-5
"""How far the engine's rows may be from the reference's before they are rounded, relative to the
largest number of a row."""
OTHERS = 0.02
"""Of the choices of a sequence, those that may be others than the reference's: an index query has
another code in some channel, and two entries score almost alike. One always may."""

KINDS = (Window, EntriesSparse, EntriesAll, EntriesIndex)  # as a layer asks for them
Kind = Window | EntriesSparse | EntriesAll | EntriesIndex
Part = tuple[str, int]
"""A kind and a layer; of EntriesIndex what is kept are keys."""


@dataclass
class RowRecorder:
    """Rows at the time they are written, and choices, by request."""

    runner: Runner
    kinds: list[Kind]
    by_name: bool
    """Numerics `published`; else an fp8 cache of other numerics, whose index rows are as computed
    or in fp8 of their own."""
    rows: dict[int, dict[Part, dict[int, Tensor]]] = field(default_factory=dict)
    """By position, or by entry."""
    choices: dict[int, dict[int, dict[int, Tensor]]] = field(default_factory=dict)
    """By layer and position."""

    @staticmethod
    def of(core: EngineCore) -> RowRecorder | None:
        """Of a core whose rows are rounded."""
        kinds = sorted(
            (kind for kind in core.plan.kinds if isinstance(kind, KINDS)),
            key=lambda kind: KINDS.index(type(kind)),
        )
        by_name = core.plan.numerics.name == PUBLISHED
        if not by_name and not any(kind.layout.fp8 for kind in kinds if _attended(kind)):
            return None
        runner = local_runner(core.executor)
        if runner.graphs is None:  # choices that are recorded do not pass through a graph
            runner.recorded = []
        return RowRecorder(runner, kinds, by_name)

    def take(self, batch: Batch) -> None:
        """Of the step that has just been computed."""
        for kind in self.kinds:
            for row in batch.rows:
                self._take_rows(kind, row)
            if isinstance(kind, EntriesIndex) and self.runner.recorded:
                self._take_choices(kind, batch.rows)

    def _take_rows(self, kind: Kind, row: BatchRow) -> None:
        caches, ratio = self.runner.caches, 1 if isinstance(kind, Window) else kind.ratio
        numbers = range(row.start // ratio, (row.start + row.count) // ratio)
        table = row.tables[caches.group(kind)]
        at = torch.tensor(
            cells(kind.layout.block_size, table, numbers.start, numbers.stop),
            dtype=torch.long,
            device=self.runner.plan.device.torch,
        )
        kept = self.rows.setdefault(row.id, {})
        for layer, view in zip(kind.layers, caches.store(kind).views, strict=True):
            assert isinstance(view, IndexView | LatentView)
            found = view.read(at) if isinstance(view, IndexView) else view.gather(at)
            kept.setdefault((kind.name, layer), {}).update(zip(numbers, found.cpu(), strict=True))

    def _take_choices(self, kind: EntriesIndex, rows: Sequence[BatchRow]) -> None:
        assert self.runner.recorded is not None
        made = self.runner.recorded.pop().positions
        places = [
            (row.id, position)
            for row in rows
            for position in range(row.start, row.start + row.count)
            if (position + 1) // kind.ratio > kind.topk
        ]
        for layer, chosen in zip(kind.layers, made, strict=bool(places)):
            for (request, position), entries in zip(places, chosen.cpu(), strict=True):
                kept = self.choices.setdefault(request, {}).setdefault(layer, {})
                kept[position] = entries

    def kept(self, request: int) -> RoundedRows:
        rows, choices = self.rows.get(request, {}), self.choices.get(request, {})
        return RoundedRows(self.kinds, self.by_name, rows, choices)


@dataclass(frozen=True)
class RoundedRows:
    """Of one request."""

    kinds: list[Kind]
    by_name: bool
    rows: dict[Part, dict[int, Tensor]]
    choices: dict[int, dict[int, Tensor]]

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Meanwhile the reference attends to these rows, and to the entries chosen."""
        replay, own = _Replay(self), compressor.largest
        compressor.largest = replay.largest
        try:
            with rows_are(replay.stored_key, replay.index_row):
                yield
        finally:
            compressor.largest = own
        replay.finish()


@contextmanager
def rows_are(
    stored_key: Callable[[Params, Tensor, int], Tensor],
    index_row: Callable[[Params, Tensor], Tensor],
) -> Iterator[None]:
    """Meanwhile the reference attends to what these make of its own rows."""
    own = published.stored_key, published.index_row
    published.stored_key, published.index_row = stored_key, index_row  # type: ignore[assignment]
    try:
        yield
    finally:
        published.stored_key, published.index_row = own


def _attended(kind: Kind) -> TypeGuard[Window | EntriesSparse | EntriesAll]:
    """Not only by an indexer."""
    return not isinstance(kind, EntriesIndex)


def right_rows(kind: Kind | None, held: Tensor, exact: Tensor, off: Tensor, rotated: int) -> Tensor:
    """Which rows are those of numbers no farther from `exact` than `off`. `kind`: None, or whose
    cache in fp8 rounds them."""
    if kind is None:
        return rounding.keys_of(held, exact, off, rotated)
    assert _attended(kind)
    return rounding.fp8_rows_of(held, exact, off, kind.layout)


class _Replay:
    """One pass of the reference, whose layers ask one after the other."""

    def __init__(self, given: RoundedRows) -> None:
        self.given = given
        self.kinds = {} if given.by_name else {kind.name: kind for kind in given.kinds}
        order = sorted((layer, i) for i, kind in enumerate(given.kinds) for layer in kind.layers)
        parts = [(given.kinds[i].name, layer) for layer, i in order]
        self.keys = iter([part for part in parts if part[0] != EntriesIndex.name])
        self.index = iter([part for part in parts if part[0] == EntriesIndex.name])
        self.choosing = iter([layer for name, layer in parts if name == EntriesIndex.name])
        self.index_row_of, self.largest_of = published.index_row, compressor.largest
        self.others: list[bool] = []

    def stored_key(self, params: Params, row: Tensor, rotated: int) -> Tensor:
        held, off = self._held(part := next(self.keys), row)
        self._require(part, right_rows(self.kinds.get(part[0]), held, row, off, rotated))
        return held

    def index_row(self, params: Params, row: Tensor) -> Tensor:
        """Queries are the reference's own."""
        if row.dim() == 3:
            return self.index_row_of(params, row)
        part = next(self.index)
        if not self.given.by_name:
            return row
        held, off = self._held(part, row)
        self._require(part, rounding.index_rows_of(held, row, off))
        return held

    def largest(self, scores: Tensor, seen: Tensor, topk: int) -> Tensor:
        best, layer = self.largest_of(scores, seen, topk), next(self.choosing)
        for position, chosen in self.given.choices.get(layer, {}).items():
            if position >= len(best):
                continue
            if not bool(((chosen >= 0) & (chosen < seen[position].sum())).all()):
                raise CheckFailed(f"published: layer {layer}, position {position}: {chosen}")
            self.others.append(not torch.equal(chosen.sort().values, best[position].sort().values))
            best[position] = chosen
        return best

    def finish(self) -> None:
        assert next(self.keys, None) is next(self.index, None) is None, "the reference asks for all"
        accepted = max(1, OTHERS * len(self.others))
        bounds.record("published, other choices", sum(self.others) / accepted)
        if sum(self.others) > accepted:
            raise CheckFailed(
                f"published: {sum(self.others)} of {len(self.others)} choices of entries are "
                f"others than the reference's, accepted {accepted:g}"
            )

    def _held(self, part: Part, row: Tensor) -> tuple[Tensor, Tensor]:
        """What the engine has of these, and how far its own may have been off."""
        kept = self.given.rows[part]
        held = [kept[number] for number in range(len(row))]
        off = FLOAT32 * row.abs().amax(1, keepdim=True)
        return torch.stack(held).to(row.dtype) if held else row, off

    def _require(self, part: Part, right: Tensor) -> None:
        if not bool(right.all()):
            name, layer = part
            number = int((~right).nonzero()[0])
            raise CheckFailed(
                f"published: layer {layer}: {name} {number} is not the reference's, rounded "
                f"({int((~right).sum())} of {len(right)})"
            )
