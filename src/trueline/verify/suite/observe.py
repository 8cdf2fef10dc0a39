"""What a running engine computes in each half of each layer, by request and position."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trueline.cache.kinds.index_keys import IndexInput
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.layers.context import StepInput
from trueline.reference.model import FEED, MIX, Half
from trueline.verify.engine import EngineRun
from trueline.verify.failed import CheckFailed
from trueline.verify.suite.held import Rows, rows_by_layer

Key = tuple[int, Half]
"""A layer's half."""


@dataclass
class Observed:
    """Of one request. Rows by position; what was computed twice counts as it was last."""

    tokens: list[int] = field(default_factory=list)
    inputs: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    outputs: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    experts: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    chosen: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """By layer: keys or entries that the positions that choose have chosen."""
    paths: dict[int, str] = field(default_factory=dict)
    """How each position was computed."""
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """Where each position's rows are, by group of state kinds."""
    slots: dict[int, int] = field(default_factory=dict)
    """Where the state after each position was kept."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    chunks: list[int] = field(default_factory=list)
    """Tokens of each prefill step."""
    stored: dict[int, Rows] = field(default_factory=dict)
    """By layer: rows of caches that round them."""
    reused: set[int] = field(default_factory=set)
    """Positions that the prefix cache had: their inputs are those of the request that computed
    them."""

    @property
    def count(self) -> int:
        """Positions."""
        return 1 + max(self.paths, default=-1)

    @property
    def computed(self) -> list[int]:
        return sorted(self.paths.keys() - self.reused)

    def rows(self, key: Key, outputs: bool = False) -> Tensor:
        """[count, hidden]."""
        found = (self.outputs if outputs else self.inputs)[key]
        return torch.stack([found[p] for p in range(self.count)])

    def take_from(self, other: Observed) -> None:
        """Positions that only the other has computed, of the tokens that both begin with."""
        for p, (ours, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if ours != theirs:
                return
            if p in self.paths or p not in other.paths:
                continue
            self.paths[p] = other.paths[p]
            self.reused.add(p)
            for mine, rows in (
                *((self.inputs.setdefault(key, {}), rows) for key, rows in other.inputs.items()),
                *((self.outputs.setdefault(key, {}), rows) for key, rows in other.outputs.items()),
                *((self.experts.setdefault(at, {}), rows) for at, rows in other.experts.items()),
                *((self.chosen.setdefault(at, {}), rows) for at, rows in other.chosen.items()),
            ):
                if p in rows:
                    mine[p] = rows[p]
            for layer, kinds in other.stored.items():
                for name, stored in kinds.items():
                    if p in stored:
                        self.stored.setdefault(layer, {}).setdefault(name, {})[p] = stored[p]


@dataclass
class _Piece:
    x: Tensor
    y: Tensor
    experts: Tensor | None = None
    chosen: tuple[list[int], Tensor] | None = None
    """Tokens of the step, and what each has chosen."""


class Watch:
    """Stands in front of a core's layers until it is closed. Steps run eagerly meanwhile."""

    def __init__(self, core: EngineCore, count: int) -> None:
        self.requests = [Observed() for _ in range(count)]
        self.runner = local_runner(core.executor)
        self.runner.recorded = []
        self.pieces: dict[Key, _Piece] = {}
        self.steps: list[tuple[int, int, int]] = []
        """Decode rows, prefill rows, tokens."""
        self.ended: list[float] = []
        """When each step was."""
        self.layers = self.runner.decoder.layers
        self.originals = [(layer.mixer, layer.feed_forward) for layer in self.layers]
        for layer in self.layers:
            layer.mixer = _WatchedMixer(layer.mixer, layer.index, self.pieces)
            layer.feed_forward = _WatchedFeed(layer.feed_forward, layer.index, self.pieces)

    def close(self) -> None:
        self.runner.recorded = None
        for layer, (mixer, feed_forward) in zip(self.layers, self.originals, strict=True):
            layer.mixer, layer.feed_forward = mixer, feed_forward

    def __call__(self, batch: Batch, ids: Mapping[int, int]) -> None:
        """The step's rows go to their requests."""
        prefills = len(batch.rows) - batch.num_decode_rows
        mixed = batch.num_decode_rows > 0 and prefills > 0
        self.ended.append(time.perf_counter())
        self.steps.append((batch.num_decode_rows, prefills, len(batch.tokens)))
        sizes = self.runner.inputs.block_sizes
        for row in batch.rows:
            request = self.requests[ids[row.id]]
            path = ("decode" if row.is_decode else "prefill") + (", mixed" if mixed else "")
            if not row.is_decode:
                request.chunks.append(row.count)
            for p in range(row.start, row.start + row.count):
                request.paths[p] = path
                request.reused.discard(p)
                places = zip(row.tables, sizes, strict=True)
                request.blocks[p] = [table[p // size] for table, size in places]
                if row.state is not None:
                    request.slots[p] = row.state.slot
            for key, piece in self.pieces.items():
                _put(request.inputs, key, row.start, piece.x[row.tokens])
                _put(request.outputs, key, row.start, piece.y[row.tokens])
                if piece.experts is not None:
                    _put(request.experts, key[0], row.start, piece.experts[row.tokens])
                if piece.chosen is not None:
                    first = row.start - row.tokens.start
                    chosen = request.chosen.setdefault(key[0], {})
                    for offset in range(row.count):
                        chosen.pop(row.start + offset, None)
                    for token, places in zip(*piece.chosen, strict=True):
                        if row.tokens.start <= token < row.tokens.stop:
                            chosen[token + first] = places
        self.pieces.clear()
        if self.runner.recorded:
            self.runner.recorded.clear()

    @property
    def step_seconds(self) -> float:
        """The median."""
        return median([b - a for a, b in pairwise(self.ended)] or [0.0])

    def finish(self, tokens: Sequence[Sequence[int]], done: EngineRun) -> None:
        """What was asked and answered; positions that were cached have the rows of whoever computed
        them."""
        for request, ids, rows in zip(self.requests, tokens, done.logits, strict=True):
            request.tokens, request.logits = list(ids), rows
        for request, stored in zip(self.requests, done.stored, strict=False):
            request.stored = rows_by_layer(stored)
        for request in self.requests:
            for other in self.requests:
                if other is not request:
                    request.take_from(other)
        for number, request in enumerate(self.requests):
            missing = sorted(set(range(request.count)) - request.paths.keys())
            if missing:
                raise CheckFailed(
                    f"prefix = cold: request {number}: position {missing[0]} was taken from the "
                    "cache, and no request with the same tokens before it has computed it"
                )


def _put(into: dict[Any, dict[int, Tensor]], key: object, start: int, rows: Tensor) -> None:
    into.setdefault(key, {}).update({start + i: row for i, row in enumerate(rows)})


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


class _Watched:
    def __init__(self, inner: Any, index: int, pieces: dict[Key, _Piece]) -> None:
        self._inner, self._index, self._pieces = inner, index, pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _WatchedMixer(_Watched):
    def forward(self, x: Any, step: StepInput, views: Any, rope: Any) -> Any:
        recorded = step.recorded.positions if step.recorded is not None else []
        before = len(recorded)
        given = _copy(x)
        y = self._inner.forward(x, step, views, rope)
        piece = _Piece(given, _copy(y))
        index = next((kind for kind in step.kinds.values() if isinstance(kind, IndexInput)), None)
        if index is not None and index.count and self._chooses():
            chosen = recorded[-1] if len(recorded) > before else index.chosen
            if chosen is not None:
                tokens = torch.arange(len(given))[_at(index.at)].tolist()
                piece.chosen = tokens, _copy(chosen)
        self._pieces[self._index, MIX] = piece
        return y

    def _chooses(self) -> bool:
        return getattr(self._inner.spec, "indexer", None) is not None


class _WatchedFeed(_Watched):
    def forward(self, x: Any, forced: Tensor | None) -> Any:
        given = _copy(x)
        y, ids = self._inner.forward(x, forced)
        experts = None if ids is None else _copy(ids)
        self._pieces[self._index, FEED] = _Piece(given, _copy(y), experts)
        return y, ids


def _at(at: slice | Tensor) -> slice | Tensor:
    return at if isinstance(at, slice) else at.cpu()
