"""Decode steps captured once per batch size and replayed: one launch instead of hundreds. Where
there is an indexer, twice: steps in which no row sees more than its top-k attend densely.

A graph reads and writes fixed buffers. A step fills the rows it has and makes the others up to the
captured size harmless: they see no position, write the null block and the null slot, and nobody
reads what they give. Everything that changes from step to step is in the buffers, nothing in the
graph: not the context lengths, nor which step before drew a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from trueline.cache.kinds.inputs import Column, FixedRows
from trueline.engine.batch import Batch
from trueline.engine.inputs import Inputs
from trueline.engine.messages import UNKNOWN
from trueline.layers.decoder import Decoder
from trueline.ops.sampling import CapturedSampling, SamplingState
from trueline.plan.plan import Plan

Captured = Callable[[], object]
Capture = Callable[[Captured], Captured]
"""From a function to what replays it."""

NOWHERE = -1
COLUMNS: dict[str, Column] = {
    "tokens": Column(torch.int64),
    "source": Column(torch.int64, NOWHERE),  # place among the tokens drawn last, if it is of those
    "positions": Column(torch.int64),
    "lengths": Column(torch.int32),  # positions that the token sees
    "seed": Column(torch.int64),
    "next_position": Column(torch.int64),  # of the token to be sampled, for the noise
    "temperature": Column(torch.float64),
}
CELLS = Column(torch.int64)
"""Of the null block."""
# Rows of a block table that are copied one by one; more go together.
FEW = 8


def capture_for(plan: Plan) -> Capture | None:
    return CudaCapture() if plan.graphs else None


class CudaCapture:
    """All graphs share one pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def __call__(self, step: Captured) -> Captured:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiles what is new, outside of the capture
            step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        return graph.replay


def capture_sizes(most: int) -> list[int]:
    """Batch sizes worth a graph of their own, up to the largest batch."""
    sizes = chain((1, 2, 4), range(8, 65, 8), range(80, 129, 16), range(160, most + 32, 32))
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Which steps a graph is captured for."""

    size: int
    """Rows."""
    tokens_per_row: int
    longest: int
    """The most positions that a token sees."""


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """A step's rows of what a graph computes, valid until the next replay."""

    hidden: Tensor
    logits: Tensor
    tokens: Tensor
    bad: Tensor
    key: GraphKey


class FixedTable:
    """The block tables of a step's rows, in one buffer on the device. Two pinned buffers alternate,
    as those of `InputBuffers` do."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.hosts = [torch.zeros(rows, blocks, dtype=torch.int32, pin_memory=pin) for _ in "ab"]
        self._held: list[list[int]] = [[] for _ in range(rows)]

    def fill(self, tables: Sequence[list[int]], buffer: int) -> None:
        """Copy rows that changed, by way of this pinned buffer; what stands after a row's last
        block is never read."""
        changed = [i for i, ids in enumerate(tables) if ids != self._held[i]]
        if not changed:
            return
        pinned = self.hosts[buffer]
        array = pinned.numpy()
        several = len(changed) > FEW
        for i in range(changed[-1] + 1) if several else changed:
            array[i, : len(tables[i])] = tables[i]
            self._held[i] = tables[i]
        if several:
            stop = changed[-1] + 1
            self.table[:stop].copy_(pinned[:stop], non_blocking=True)
        else:
            for i in changed:
                self.table[i].copy_(pinned[i], non_blocking=True)

    def forget(self) -> None:
        """Copy all rows again in the next step: a copy may have failed."""
        self._held = [[] for _ in self._held]


class InputBuffers:
    """What a step tells the graphs, in one buffer on the device and one copy to it, and the block
    tables. Two pinned buffers alternate: the copy of a step may still be under way when the next is
    written."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        tokens: int,
        tables: Sequence[FixedTable],
        device: torch.device,
    ) -> None:
        # the widest first: each begins at a multiple of its own width
        columns = dict(sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize))
        self._columns, self.tables = columns, tables
        sizes = [column.dtype.itemsize * tokens for column in columns.values()]
        self._bytes = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        pin = device.type == "cuda"
        self._hosts = [torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin) for _ in "ab"]
        self.columns = dict(zip(columns, self._cut(self._bytes, sizes), strict=True))
        self._arrays = [
            {name: part.numpy() for name, part in zip(columns, self._cut(host, sizes), strict=True)}
            for host in self._hosts
        ]
        self._current = 0

    def _cut(self, data: Tensor, sizes: list[int]) -> list[Tensor]:
        parts = torch.split(data, sizes)
        columns = self._columns.values()
        return [part.view(column.dtype) for part, column in zip(parts, columns, strict=True)]

    def fill(
        self,
        values: Mapping[str, Sequence[float]],
        num_tokens: int,
        tables: Sequence[Sequence[list[int]]],
    ) -> None:
        """For a step of `num_tokens` tokens; the rest of each buffer is padding. `values`: by
        column; one without values is padding too. `tables`: of each row, by group."""
        self._current = 1 - self._current
        for name, array in self._arrays[self._current].items():
            padding = self._columns[name].padding
            array[num_tokens:] = padding
            array[:num_tokens] = values.get(name, padding)
        self._bytes.copy_(self._hosts[self._current], non_blocking=True)
        for fixed, rows in zip(self.tables, tables, strict=True):
            fixed.fill(rows, self._current)

    def forget(self) -> None:
        for fixed in self.tables:
            fixed.forget()


class DecodeGraphs:
    def __init__(self, inputs: Inputs, decoder: Decoder, drawn: Tensor, capture: Capture) -> None:
        self.inputs, self.decoder, self.drawn, self.capture = inputs, decoder, drawn, capture
        plan = self.plan = inputs.plan
        self.draw = cast("CapturedSampling", plan.sampling).draw  # declared: the plan captures
        rows, device = plan.limits.max_num_seqs, drawn.device
        self.fixed = InputBuffers(
            {**COLUMNS, **self._cell_columns(), **inputs.columns},
            len(drawn),
            [
                FixedTable(rows, -(-plan.max_model_len // size), device)
                for size in inputs.block_sizes
            ],
            device,
        )
        self.bad = torch.zeros(len(drawn), dtype=torch.bool, device=device)
        self.sizes = capture_sizes(rows)
        self.limits = inputs.limits
        """Steps are captured for each: no token sees more positions."""
        self._captured: dict[GraphKey, tuple[Captured, dict[str, Tensor]]] = {}

    def _cell_columns(self) -> dict[str, Column]:
        return {f"cells.{group}": CELLS for group in range(len(self.inputs.block_sizes))}

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Before the first step: capturing runs a step, here one of padding only. Largest first:
        the others fit into its memory."""
        self.fixed.fill({}, 0, [()] * len(self.fixed.tables))
        drafts = self.plan.limits.num_draft_tokens
        keys = [
            GraphKey(size, tokens, longest)
            for size in reversed(self.sizes)
            for tokens in sorted({1 + drafts, 1}, reverse=True)
            for longest in reversed(self.limits)
        ]
        for done, key in enumerate(keys, 1):
            self._captured[key] = self._capture(key)
            if progress:
                progress(done, len(keys))

    def run(
        self, batch: Batch, states: Sequence[SamplingState], places: Mapping[int, int]
    ) -> GraphOutputs:
        """`states`: of each token, which all sample. `places`: where each request's token is among
        those drawn last."""
        key = self._fill(batch, self._values(batch, states, places))
        replay, made = self._captured[key]
        replay()
        count = len(batch.tokens)
        hidden, logits = made["hidden"][:count], made["logits"][:count]
        return GraphOutputs(hidden, logits, self.drawn[:count], self.bad[:count], key)

    def key_for(self, count: int, tokens_per_row: int, longest: int) -> GraphKey:
        """The graph for so many rows, of which one sees `longest` positions and none more."""
        size = next(size for size in self.sizes if size >= count)
        limit = next(limit for limit in self.limits if limit >= longest)
        return GraphKey(size, tokens_per_row, limit)

    def padded_hidden(self, key: GraphKey) -> Tensor:
        """What this graph computed last, padded rows included."""
        return self._captured[key][1]["hidden"]

    def dummy_step(self, batch: Batch) -> Captured:
        """What replays a step of made-up rows, to be timed."""
        # different tokens take different experts
        words = len(self.decoder.embedding)
        tokens = [(1 + i) * 7919 % words for i in range(len(batch.tokens))]
        replay, _ = self._captured[self._fill(batch, {"tokens": tokens, **self._rows(batch)})]
        return replay

    def _fill(self, batch: Batch, values: Mapping[str, Sequence[float]]) -> GraphKey:
        tables = [
            [row.tables[group] for row in batch.rows] for group in range(len(self.fixed.tables))
        ]
        self.fixed.fill(values, len(batch.tokens), tables)
        assert batch.tokens_per_row is not None
        return self.key_for(len(batch.rows), batch.tokens_per_row, max(batch.positions) + 1)

    def _values(
        self, batch: Batch, states: Sequence[SamplingState], places: Mapping[int, int]
    ) -> dict[str, Sequence[float]]:
        carried = {point.token: places[point.id] for point in batch.carried}
        return {
            "tokens": [0 if token == UNKNOWN else token for token in batch.tokens],
            "source": [carried.get(i, NOWHERE) for i in range(len(batch.tokens))],
            "seed": [state.seed for state in states],
            "next_position": [state.position for state in states],
            "temperature": [
                0.0 if state.params.is_greedy else state.params.temperature for state in states
            ],
            **self._rows(batch),
        }

    def _rows(self, batch: Batch) -> dict[str, Sequence[int]]:
        """The columns that do not depend on token values."""
        return {
            "positions": batch.positions,
            "lengths": [position + 1 for position in batch.positions],
            **{f"cells.{group}": cells for group, cells in enumerate(batch.cells)},
            **self.inputs.values(batch),
        }

    def _capture(self, key: GraphKey) -> tuple[Captured, dict[str, Tensor]]:
        made: dict[str, Tensor] = {}

        def step() -> None:
            made["hidden"], made["logits"] = self._step(key)

        return self.capture(step), made

    def _step(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """What is captured: every tensor is a fixed buffer or made here."""
        count = key.size * key.tokens_per_row
        columns = {name: column[:count] for name, column in self.fixed.columns.items()}
        before = self.drawn[columns["source"].clamp_min(0)]
        tokens = torch.where(columns["source"] >= 0, before, columns["tokens"])
        fixed = FixedRows(
            lengths=columns["lengths"],
            columns=columns,
            tables=[fixed.table[: key.size] for fixed in self.fixed.tables],
            tokens_per_row=key.tokens_per_row,
            longest=key.longest,
        )
        cells = [columns[name] for name in self._cell_columns()]
        given = self.inputs.build_captured(tokens, columns["positions"], fixed, cells)
        hidden = self.decoder.hidden(given, self.inputs.caches.views)
        logits = self.decoder.logits(hidden)
        drawn, bad = self.draw(
            logits, columns["temperature"], columns["seed"], columns["next_position"]
        )
        self.drawn[:count] = self.decoder.collective.from_first(drawn)
        self.bad[:count] = bad
        return hidden, logits
