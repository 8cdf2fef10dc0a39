"""Mistakes with what only a GPU has: padded heads and rows, lists made on the device, graphs that
are replayed. Where there is none, the interpreter and steps that are run again stand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from trueline.cache.kinds.entries import EntryInputs
from trueline.cache.kinds.inputs import Column, FixedRows
from trueline.cache.kinds.latent import LatentInputs
from trueline.cache.kinds.lightning import RecurrentInputs
from trueline.cache.kinds.tails import TailInputs
from trueline.cache.rows import BatchRow
from trueline.cache.store import LatentView
from trueline.engine import graphs
from trueline.engine.batch import Batch
from trueline.engine.graphs import DecodeGraphs, InputBuffers
from trueline.layers.mla import MLA
from trueline.ops.capabilities import Opaque
from trueline.ops.mla_decode.launch_plan import LaunchPlan
from trueline.verify.faults import Fault, Make


def _unpadded(head_tiles: Make) -> object:
    """Split metadata sized from the heads there are (story 5): too few tiles, or none."""
    return property(lambda plan: plan.heads // plan.head_tile)


def _of_unpadded_heads(entries: Make) -> Make:
    """A work list as long as for the heads there are, while the kernel works on padded ones
    (story 5): the last parts of the last rows are never computed."""

    def broken(plan: LaunchPlan, rows: int) -> int:
        whole: int = entries(plan, rows)
        return -(-whole * plan.heads // plan.padded_heads)

    return broken


def _one_short(entries: Make) -> Make:
    return lambda plan, rows: entries(plan, rows) - 1


def _padded_with(**values: int) -> Make:
    def make(columns: Mapping[str, Column]) -> dict[str, Column]:
        return {
            name: Column(dtype, values.get(name, padding))
            for name, (dtype, padding) in columns.items()
        }

    return make


def _cells_of_the_first(fill: Make) -> Make:
    """Padded rows write where the first row does, after it."""

    def broken(self: InputBuffers, values: object, num_tokens: int, tables: object) -> None:
        fill(self, values, num_tokens, tables)
        for name, column in self.columns.items():
            if num_tokens and name.startswith("cells."):
                column[num_tokens:] = column[0].clone()

    return broken


def _one_step_behind(fill: Make) -> Make:
    """Context lengths stay what they were when the rows were last filled in."""
    before: dict[int, Sequence[float]] = {}

    def broken(
        self: InputBuffers, values: Mapping[str, Sequence[float]], num_tokens: int, tables: object
    ) -> None:
        now = values.get("lengths", [])
        stale = before.get(num_tokens, now)
        before[num_tokens] = now
        fill(self, dict(values) | {"lengths": stale} if num_tokens else values, num_tokens, tables)

    return broken


def _tokens_of_the_host(values: Make) -> Make:
    """What the step before has drawn is not looked at."""

    def broken(self: DecodeGraphs, batch: Batch, rows: object, places: object) -> object:
        made = values(self, batch, rows, places)
        return made | {"source": [graphs.NOWHERE] * len(batch.tokens)}

    return broken


def _never_choosing(key_for: Make) -> Make:
    return lambda self, count, tokens, longest: key_for(
        self, count, tokens, min(longest, self.limits[0])
    )


def _choices_of_the_row_before(attend: Make) -> Make:
    def broken(
        self: MLA, q_nope: object, q_rope: object, rows: object, view: object, out: object,
        chosen: Tensor,
    ) -> None:  # fmt: skip
        attend(self, q_nope, q_rope, rows, view, out, chosen.roll(1, 0))

    return broken


def _nothing_hidden(attend: Make) -> Make:
    def broken(
        self: MLA, q_nope: Tensor, q_rope: Tensor, prepared: Opaque, view: LatentView, out: Tensor,
        chosen: object,
    ) -> None:  # fmt: skip
        assert self.latent.masked_prefill is not None
        self.latent.masked_prefill.run(
            q_nope, q_rope, view, prepared, self.heads, out,
            softmax_scale=self.spec.softmax_scale,
        )  # fmt: skip

    return broken


def _lists_from_the_front(split: Make) -> Make:
    """Rows with lists take the first choices of the step instead of their own."""

    def broken(self: LatentInputs, *given: object) -> object:
        rows = split(self, *given)
        return replace(rows, selected_rows=range(len(rows.selected_rows)))

    return broken


def _one_late(values: Make) -> Make:
    return lambda self, rows: values(self, [replace(row, start=row.start - 1) for row in rows])


def _rotated_at_its_end(values: Make) -> Make:
    def broken(self: EntryInputs, rows: Sequence[BatchRow]) -> object:
        made = values(self, rows)
        return made | {"positions": [at + self.kind.ratio - 1 for at in made["positions"]]}

    return broken


def _in_the_next_cell(values: Make) -> Make:
    def broken(self: EntryInputs, rows: Sequence[BatchRow]) -> object:
        made = values(self, rows)
        return made | {"cells": [cell + 1 for cell in made["cells"]]}

    return broken


def _tails_of_the_row_before(read: Make) -> Make:
    def broken(self: TailInputs, fixed: FixedRows) -> object:
        made = read(self, fixed)
        return replace(made, tails=made.tails.roll(1, 0))

    return broken


def _entries_of_the_row_before(read: Make) -> Make:
    def broken(self: EntryInputs, fixed: FixedRows) -> object:
        made = read(self, fixed)
        parts = {}
        for name in ("seeing", "choosing"):
            part = getattr(made, name)
            if part is not None:
                rows = replace(part.rows, entries=part.rows.entries.roll(1, 0))
                part = replace(part, rows=rows)
            parts[name] = part
        return replace(made, **parts)

    return broken


_G, _M, _L = "graph = eager", "v3-shallow", "ling-shallow"
_H, _V = "masked prefill", "v32-shallow"
_C, _V4 = "graph = eager, compressed", "v4-shallow"

GPU_FAULTS = [
    Fault("split-unpadded-heads", "split metadata sized from the unpadded heads (story 5)",
          "any heads", _M, LaunchPlan, "head_tiles", _unpadded),
    Fault("work-list-unpadded-heads", "the list of parts sized from the unpadded heads (story 5)",
          "any heads", _M, LaunchPlan, "entries", _of_unpadded_heads),
    Fault("work-list-short", "the list of parts has one entry too few", "any heads", _M,
          LaunchPlan, "entries", _one_short),
    Fault("padded-rows-read", "padded rows see positions of the null block", _G, _M,
          graphs, "COLUMNS", _padded_with(lengths=3)),
    Fault("padded-rows-write", "padded rows write a row's cache", _G, _M,
          InputBuffers, "fill", _cells_of_the_first),
    Fault("stale-lengths", "a graph sees the contexts of the step before", _G, _M,
          InputBuffers, "fill", _one_step_behind),
    Fault("stale-drawn-token", "a graph does not see the token drawn last", _G, _M,
          DecodeGraphs, "_values", _tokens_of_the_host),
    Fault("padded-rows-state", "padded rows write a sequence's state", _G, _L,
          RecurrentInputs, "columns", _padded_with(slots=1)),
    Fault("graph-never-chooses", "a row that sees more than top-k is run by the graph of those "
          "that see all", _G, _V, DecodeGraphs, "key_for", _never_choosing),
    Fault("masked-row-before", "tokens hide what the token before did not choose", _H, _V,
          MLA, "_attend_masked", _choices_of_the_row_before),
    Fault("masked-nothing-hidden", "tokens of masked prefill see everything", _H, _V,
          MLA, "_attend_masked", _nothing_hidden),
    Fault("masked-lists-from-the-front", "beside masked prefill, rows with lists take others'",
          _H, _V, LatentInputs, "split", _lists_from_the_front),
    Fault("captured-window-completes-late", "in a graph a window is complete one token late",
          _C, _V4, EntryInputs, "values", _one_late),
    Fault("captured-entry-rotated-at-its-end", "in a graph entries are rotated at the last of "
          "their positions", _C, _V4, EntryInputs, "values", _rotated_at_its_end),
    Fault("captured-entry-cell-off", "in a graph entries go to the cell after theirs", _C, _V4,
          EntryInputs, "values", _in_the_next_cell),
    Fault("captured-tails-of-the-row-before", "rows of a graph pool the tails of another", _C, _V4,
          TailInputs, "read_fixed", _tails_of_the_row_before),
    Fault("captured-entries-of-the-row-before", "rows of a graph see the entries of another", _C,
          _V4, EntryInputs, "read_fixed", _entries_of_the_row_before),
    Fault("padded-rows-complete", "padded rows complete a window of the null block", _C, _V4,
          graphs, "COLUMNS", _padded_with(lengths=8)),
    Fault("padded-rows-write-tails", "padded rows write a row's window and tails", _C, _V4,
          InputBuffers, "fill", _cells_of_the_first),
    Fault("stale-lengths-of-windows", "a graph completes the windows of the step before", _C, _V4,
          InputBuffers, "fill", _one_step_behind),
    Fault("graph-never-chooses-entries", "a row that sees more entries than top-k is run by the "
          "graph of those that see all", _C, _V4, DecodeGraphs, "key_for", _never_choosing),
]  # fmt: skip
