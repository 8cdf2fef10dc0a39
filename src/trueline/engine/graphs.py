"""Decode steps captured once per batch size and replayed: one launch instead of hundreds. Where
there is an indexer, twice: while no row sees more than it lets through, nothing is chosen.

A graph reads and writes fixed buffers. A step fills the rows it has and makes the others up to the
captured size harmless: they see no position, write the null block and the null slot, and nobody
reads what they give. Everything that changes from step to step is in the buffers, nothing in the
graph: not the context lengths, nor which step before drew a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import Latent
from trueline.engine.batch import Batch
from trueline.engine.inputs import Inputs
from trueline.engine.messages import UNKNOWN
from trueline.layers.context import Selected, SparseStep, StateStep, StepInput
from trueline.layers.decoder import Decoder
from trueline.ops.lightning import StateTable
from trueline.ops.mla_decode import DecodeRows, DecodeTable
from trueline.ops.sampling import CapturedSampling, SamplingState
from trueline.ops.sparse_rows import Table
from trueline.plan.plan import Plan

Step = Callable[[], Any]
Capture = Callable[[Step], Step]
"""From a function to what replays it."""

NOWHERE = -1
# Name, dtype and what a padded row has there.
FIELDS: dict[str, tuple[torch.dtype, int]] = {
    "tokens": (torch.int64, 0),
    "source": (torch.int64, NOWHERE),  # place among the tokens drawn last, where it is one of them
    "positions": (torch.int64, 0),
    "cells": (torch.int64, 0),  # of the null block
    "seed": (torch.int64, 0),
    "place": (torch.int64, 0),  # of the token to be drawn, for the noise
    "temperature": (torch.float64, 0),
    "lengths": (torch.int32, 0),
    "starts": (torch.int32, 0),
    "sources": (torch.int32, 0),
    "slots": (torch.int32, 0),
    "snapshots": (torch.int32, 0),
}
# Rows of the block table that are copied one by one; more go together.
FEW = 8


def capture_for(plan: Plan) -> Capture | None:
    return CudaCapture() if plan.graphs else None


class CudaCapture:
    """All graphs share one pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Step) -> Step:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compiles what is new, outside of the capture
            step()
        torch.cuda.current_stream().wait_stream(aside)
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
    """Of which a graph is: how many rows, and whether they choose among their positions."""

    size: int
    chooses: bool


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """Rows of the fixed buffers: theirs until the next step."""

    hidden: Tensor
    logits: Tensor
    tokens: Tensor
    bad: Tensor
    kind: GraphKey


class InputBuffers:
    """What a step tells the graphs, in one buffer on the device and one copy to it. Two pinned
    buffers take turns: the copy of a step may still be under way when the next is written."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        sizes = [dtype.itemsize * rows for dtype, _ in FIELDS.values()]
        self._bytes = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        pin = device.type == "cuda"
        self._turns = [torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin) for _ in "ab"]
        self.fields = dict(zip(FIELDS, self._cut(self._bytes, sizes), strict=True))
        self._host = [
            {name: part.numpy() for name, part in zip(FIELDS, self._cut(turn, sizes), strict=True)}
            for turn in self._turns
        ]
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._tables = [torch.zeros(rows, blocks, dtype=torch.int32, pin_memory=pin) for _ in "ab"]
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self._turn = 0

    @staticmethod
    def _cut(data: Tensor, sizes: list[int]) -> list[Tensor]:
        kinds = (dtype for dtype, _ in FIELDS.values())
        parts = torch.split(data, sizes)
        return [part.view(dtype) for part, dtype in zip(parts, kinds, strict=True)]

    def fill(self, values: Mapping[str, Sequence[float]], blocks: Sequence[list[int]]) -> None:
        """All rows: those after the last are padding."""
        self._turn = 1 - self._turn
        count = len(blocks)
        for name, array in self._host[self._turn].items():
            array[count:] = FIELDS[name][1]
            array[:count] = values[name] if name in values else FIELDS[name][1]
        self._bytes.copy_(self._turns[self._turn], non_blocking=True)
        self._fill_table(blocks)

    def forget(self) -> None:
        """What the table holds: a copy to it may have failed."""
        self._held = [[] for _ in self._held]

    def _fill_table(self, blocks: Sequence[list[int]]) -> None:
        """Rows that changed; what stands after a row's last block is never read."""
        changed = [i for i, ids in enumerate(blocks) if ids != self._held[i]]
        if not changed:
            return
        pinned = self._tables[self._turn]
        array = pinned.numpy()
        several = len(changed) > FEW
        for i in range(changed[-1] + 1) if several else changed:
            array[i, : len(blocks[i])] = blocks[i]
            self._held[i] = blocks[i]
        if several:
            stop = changed[-1] + 1
            self.table[:stop].copy_(pinned[:stop], non_blocking=True)
        else:
            for i in changed:
                self.table[i].copy_(pinned[i], non_blocking=True)


class DecodeGraphs:
    def __init__(self, inputs: Inputs, decoder: Decoder, drawn: Tensor, capture: Capture) -> None:
        self.inputs, self.decoder, self.drawn, self.capture = inputs, decoder, drawn, capture
        plan = inputs.plan
        self.plan = plan
        self.draw = cast("CapturedSampling", plan.sampling).draw  # declared: the plan captures
        rows = plan.limits.max_num_seqs
        most = -(-plan.max_model_len // plan.block_size)
        self.fixed = InputBuffers(rows, most, drawn.device)
        self.bad = torch.zeros(rows, dtype=torch.bool, device=drawn.device)
        self.sizes = capture_sizes(rows)
        self.topk = plan.max_model_len if inputs.topk is None else inputs.topk
        """Rows that see more than this choose."""
        self._captured: dict[GraphKey, tuple[Step, dict[str, Tensor]]] = {}

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Before the first step: capturing runs a step, here one of padding only. Largest first:
        the others fit into its memory."""
        self.fixed.fill({}, [])
        choices = (True, False) if self.plan.max_model_len > self.topk else (False,)
        kinds = [GraphKey(size, chooses) for size in reversed(self.sizes) for chooses in choices]
        for done, kind in enumerate(kinds, 1):
            self._captured[kind] = self._capture(kind)
            if progress:
                progress(done, len(kinds))

    def run(
        self, batch: Batch, rows: Sequence[SamplingState], places: Mapping[int, int]
    ) -> GraphOutputs:
        """`places`: where each request's token is among those drawn last."""
        count = len(batch.rows)
        self.fixed.fill(self._values(batch, rows, places), batch.blocks)
        kind = self.key_for(count, max(batch.positions) + 1)
        replay, made = self._captured[kind]
        replay()
        hidden, logits = made["hidden"][:count], made["logits"][:count]
        return GraphOutputs(hidden, logits, self.drawn[:count], self.bad[:count], kind)

    def key_for(self, count: int, longest: int) -> GraphKey:
        """The graph for so many rows, of which one sees `longest` positions and none more."""
        size = next(size for size in self.sizes if size >= count)
        return GraphKey(size, longest > self.topk)

    def whole(self, kind: GraphKey) -> Tensor:
        """What this graph made last, padded rows included."""
        return self._captured[kind][1]["hidden"]

    def dummy_step(self, count: int, context: int) -> Step:
        """A step of made-up rows at positions after `context`, to be timed."""
        size = self.plan.block_size
        each = -(-(context + 1) // size)
        usable = self.plan.num_blocks - 1
        blocks = [[1 + (i * each + b) % usable for b in range(each)] for i in range(count)]
        rows, words = range(count), len(self.decoder.embedding)
        values: dict[str, Sequence[float]] = {
            "tokens": [
                (1 + i) * 7919 % words for i in rows
            ],  # different ones take different experts
            "positions": [context] * count,
            "cells": [ids[-1] * size + context % size for ids in blocks],
            "lengths": [context + 1] * count,
        }
        if self.plan.slots is not None:
            slots = [1 + i % (self.plan.slots.num_slots - 1) for i in rows]
            values |= {"starts": [context] * count, "sources": slots, "slots": slots}
        self.fixed.fill(values, blocks)
        replay, _ = self._captured[self.key_for(count, context + 1)]
        return replay

    def _values(
        self, batch: Batch, rows: Sequence[SamplingState], places: Mapping[int, int]
    ) -> dict[str, Sequence[float]]:
        carried = {point.token: places[point.id] for point in batch.carried}
        values: dict[str, Sequence[float]] = {
            "tokens": [0 if token == UNKNOWN else token for token in batch.tokens],
            "source": [carried.get(i, NOWHERE) for i in range(len(batch.rows))],
            "positions": batch.positions,
            "cells": batch.cells,
            "lengths": [position + 1 for position in batch.positions],
            "seed": [row.seed for row in rows],
            "place": [row.position for row in rows],
            "temperature": [0.0 if r.params.is_greedy else r.params.temperature for r in rows],
        }
        if batch.states:
            values |= StateTable.columns([row for _, row in batch.states])
        return values

    def _capture(self, kind: GraphKey) -> tuple[Step, dict[str, Tensor]]:
        made: dict[str, Tensor] = {}

        def step() -> None:
            made["hidden"], made["logits"] = self._step(kind)

        return self.capture(step), made

    def _step(self, kind: GraphKey) -> tuple[Tensor, Tensor]:
        """What is captured: every tensor is a fixed buffer or made here."""
        size = kind.size
        fields = {name: field[:size] for name, field in self.fixed.fields.items()}
        before = self.drawn[fields["source"].clamp_min(0)]
        tokens = torch.where(fields["source"] >= 0, before, fields["tokens"])
        given = self._input(fields, tokens, kind.chooses)
        hidden = self.decoder.hidden(given, self.inputs.caches.views)
        logits = self.decoder.logits(hidden)
        drawn, bad = self.draw(logits, fields["temperature"], fields["seed"], fields["place"])
        self.drawn[:size] = drawn
        self.bad[:size] = bad
        return hidden, logits

    def _input(self, fields: dict[str, Tensor], tokens: Tensor, chooses: bool) -> StepInput:
        size = len(tokens)
        seen = self.plan.max_model_len if chooses else min(self.plan.max_model_len, self.topk)
        blocks = -(-seen // self.plan.block_size)
        table = DecodeTable(fields["lengths"], self.fixed.table[:size, :blocks])
        prepared = sparse = states = None
        decode: DecodeRows | DecodeTable = table
        if chooses:  # one way for all rows: those that see less take all of it
            decode, sparse = DecodeRows([], []), self._sparse(table)
        else:
            view, tiling = self.inputs.caches.first(Latent), self.plan.tiling
            ops, heads = self.inputs.ops, self.inputs.heads
            prepared = ops.mla_decode.prepare(table, view, tiling, heads)
        recurrent = self.inputs.ops.recurrent
        if recurrent is not None:
            columns = (fields[name] for name in ("starts", "sources", "slots", "snapshots"))
            states = StateStep(size, recurrent.lightning.prepare(StateTable(*columns)), None)
        return StepInput(
            tokens,
            fields["positions"],
            fields["cells"],
            decode,
            slice(0, size),
            None,
            prepared,
            states,
            sparse,
        )

    def _sparse(self, table: DecodeTable) -> SparseStep:
        plan, caches, ops = self.plan, self.inputs.caches, self.inputs.ops.sparse
        assert ops is not None
        size = len(table.lengths)
        rows = Table(table.blocks, torch.arange(size, device=table.lengths.device), table.lengths)
        keys = caches.first(IndexKeys)
        scores = ops.index_scores.prepare(rows, keys, plan.tiling, topk=self.topk)
        prepared = ops.sparse_mla.prepare(rows, caches.first(Latent), plan.tiling)
        return SparseStep(
            slice(0, size),
            table.lengths,
            ((slice(0, size), scores),),
            Selected(slice(0, size), slice(0, size), size, prepared),
            None,
            [],
        )
