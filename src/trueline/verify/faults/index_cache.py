"""Mistakes with the indexer's cache, its layouts and the ops of sparse attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from trueline.cache import index
from trueline.cache import layout as layouts
from trueline.cache.index import IndexView
from trueline.cache.layout import IndexLayout
from trueline.ops.sparse_rows import SparseRows, Table
from trueline.verify.faults import Fault, Make, Running


class HasTable(Protocol):
    """What an implementation of sparse_mla prepares, if not the table itself."""

    @property
    def table(self) -> Table: ...


def as_layout(layout: IndexLayout, kind: str) -> IndexLayout:
    """The same numbers in another layout, also where that refuses to exist."""
    other: IndexLayout = object.__new__(IndexLayout)
    for name in ("dim", "block_size", "storage", "power_of_two"):
        object.__setattr__(other, name, getattr(layout, name))
    object.__setattr__(other, "kind", kind)
    return other


def _rows_are_planar(original: Make) -> Make:
    def broken(self: IndexLayout, cell: object) -> object:
        return original(as_layout(self, "planar") if self.kind == "rows" else self, cell)

    return broken


def _offsets_always_shuffled(original: Make) -> Make:
    def broken(self: IndexLayout, byte: object) -> object:
        # folded back: at block size 1 the runs of a key reach into the blocks after it
        return original(as_layout(self, "shuffled"), byte) % self.block_bytes

    return broken


def _read_as(kind: str, where: str) -> Make:
    """The reader has an opinion of its own."""

    def make(read: Make) -> Make:
        def broken(self: IndexView, cells: Tensor) -> Tensor:
            if self.layout.kind != where:
                return read(self, cells)  # type: ignore[no-any-return]
            other = as_layout(self.layout, kind)
            offsets = other.key_offset(torch.arange(other.dim) * other.itemsize)
            return read(replace(self, layout=other, offsets=offsets), cells)  # type: ignore[no-any-return]

        return broken

    return make


def _range_of_the_other(scales: Make) -> Make:
    def broken(keys: Tensor, fp8: object, power_of_two: bool) -> Tensor:
        other = layouts.STORAGES["e4m3fnuz"].fp8
        return scales(keys, other, power_of_two)  # type: ignore[no-any-return]

    return broken


def _other_variant(dtypes: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
    return dtypes | {"e4m3fn": torch.float8_e4m3fnuz}


def _filled_with(fill: int) -> Make:
    def make(run: Make) -> Make:
        def broken(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
            made: Tensor = run(scores, lengths, topk)
            return made.masked_fill(made < 0, fill)

        return broken

    return make


def _stale(run: Make) -> Make:
    """The end of a short list is what the step before left there."""

    def broken(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
        made: Tensor = run(scores, lengths, topk)
        before = torch.arange(topk).expand_as(made)
        return torch.where(made < 0, before, made)

    return broken


def _ties_to_the_last(run: Make) -> Make:
    def broken(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
        made: Tensor = run(scores, lengths, topk).clone()
        for row in (lengths > topk).nonzero()[:, 0].tolist():
            length = int(lengths[row])
            mirrored_scores = scores[row : row + 1, :length].flip(1)
            mirrored = run(mirrored_scores, lengths[row : row + 1], topk)
            made[row] = (length - 1 - mirrored[0]).sort().values
        return made

    return broken


def _unseen_scored(run: Make) -> Make:
    """Whatever stands after a row's end competes."""

    def broken(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
        seen = torch.where(lengths > topk, scores.shape[1], lengths)
        return run(scores, seen, topk)  # type: ignore[no-any-return]

    return broken


def _one_counter(of: staticmethod[[SparseRows], Table]) -> staticmethod[[SparseRows], Table]:
    """Blocks are looked up by the number of the row, as if every sequence had one row."""

    def broken(rows: SparseRows) -> Table:
        table = of(rows)
        return replace(table, run=torch.arange(len(table.run)).clamp_max(len(table.blocks) - 1))

    return staticmethod(broken)


def _base_2(run: Make) -> Make:
    def broken(*arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        out, lse = run(*arguments, **options)
        return out, lse / math.log(2)

    return broken


def _everything(run: Make) -> Make:
    """The selection is ignored."""

    def broken(
        q: Tensor, view: object, prepared: Table | HasTable, positions: Tensor, **options: object
    ) -> object:
        table = prepared if isinstance(prepared, Table) else prepared.table
        every = torch.arange(int(table.lengths.max())).expand(len(q), -1)
        every = torch.where(every < table.lengths[:, None], every, -1)
        return run(q, view, prepared, every, **options)

    return broken


def _in_place(heads: Callable[[int], bool]) -> Make:
    """A fast path writes into what it was given, and returns it."""

    def make(run: Make) -> Make:
        def broken(x: Tensor, cos: Tensor, sin: Tensor, pairing: object) -> Tensor:
            made: Tensor = run(x, cos, sin, pairing)
            return x.copy_(made) if heads(x.shape[1]) else made

        return broken

    return make


_CACHE, _OPS = "index cache", "sparse op = reference"
_TOP, _ATTEND, _ROPE = Running("topk"), Running("sparse_mla"), Running("rope")
_ANY = "v32-near"

INDEX_FAULTS = [
    Fault("index-always-planar", "keys are planar where the layout is rows (story 4)", _CACHE,
          _ANY, IndexLayout, "key_start", _rows_are_planar),
    Fault("index-always-shuffled", "keys are shuffled at block size 1 too (story 4)", _CACHE, _ANY,
          IndexLayout, "key_offset", _offsets_always_shuffled),
    Fault("index-shuffle-not-read", "the writer shuffles, the reader does not", _CACHE, _ANY,
          IndexView, "read", _read_as("planar", "shuffled")),
    Fault("index-rows-of-planar", "a planar block read as rows of key and scale", _CACHE, _ANY,
          IndexView, "read", _read_as("rows", "planar")),
    Fault("index-fnuz-range", "keys in e4m3fn scaled to the range of e4m3fnuz", _CACHE, _ANY,
          index, "fp8_scales", _range_of_the_other),
    Fault("index-fnuz-bytes", "bytes of e4m3fn taken for e4m3fnuz", _CACHE, _ANY,
          index, "DTYPES", _other_variant),
    Fault("index-scale-divided", "an fp8 key divided by its scale", _CACHE, _ANY,
          index, "dequantise", lambda _: lambda codes, scales: codes / scales[:, None]),
    Fault("selection-zero-fill", "short lists filled with position 0", _OPS, _ANY,
          _TOP, "run", _filled_with(0)),
    Fault("selection-stale-fill", "short lists end with what was there before", _OPS, _ANY,
          _TOP, "run", _stale),
    Fault("selection-highest-tie", "among equal scores the highest position", _OPS, _ANY,
          _TOP, "run", _ties_to_the_last),
    Fault("selection-unseen", "scores after a row's end compete", _OPS, _ANY,
          _TOP, "run", _unseen_scored),
    Fault("sparse-one-counter", "one counter for rows and for sequences", _OPS, _ANY,
          Table, "of", _one_counter),
    Fault("sparse-lse-base-2", "lse of sparse attention in base 2", _OPS, _ANY,
          _ATTEND, "run", _base_2),
    Fault("selection-ignored", "attention over everything", _OPS, _ANY,
          _ATTEND, "run", _everything),
    Fault("rope-writes-q", "rotation of queries in place", "rope contract", _ANY,
          _ROPE, "run", _in_place(lambda heads: heads > 1)),
    Fault("rope-writes-k", "rotation of keys in place", "rope contract", _ANY,
          _ROPE, "run", _in_place(lambda heads: heads == 1)),
]  # fmt: skip
