"""Mistakes with states per sequence, in the running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from trueline.cache.kinds.lightning import LightningState, RecurrentInputs
from trueline.cache.pool import Pool
from trueline.cache.rows import BatchRow
from trueline.cache.slots import SlotPool
from trueline.engine.states import States
from trueline.layers.context import StepInput
from trueline.layers.lightning import Lightning
from trueline.layers.ropes import Ropes
from trueline.ops.lightning import StateRow
from trueline.ops.lightning import cpu as lightning
from trueline.parallel.collective import ThreadRank
from trueline.spec.mixer import LightningSpec, head_slopes
from trueline.verify.faults import Fault, Make, Running


class _Unchecked(StateRow):
    """A row that may break the contract."""

    def __post_init__(self) -> None:
        pass


def _other_row(changed: Callable[[StateRow], StateRow]) -> Make:
    def make(prepare: Make) -> Make:
        return lambda parts: prepare([(at, changed(row)) for at, row in parts])

    return make


def _not_cleared(row: StateRow) -> StateRow:
    """A new sequence goes on from what its slot held before."""
    if row.source is not None:
        return row
    return _Unchecked(row.start, row.slot, row.slot, row.snapshots)


def _cleared_again(row: StateRow) -> StateRow:
    """Every chunk of a prompt starts from zeros."""
    return _Unchecked(row.start, None, row.slot, row.snapshots)


def _with_states_of(rows: Sequence[BatchRow], others: Sequence[BatchRow]) -> list[BatchRow]:
    """Rows that have the slots of others, and so start where those do."""
    return [
        replace(row, state=other.state, start=other.start)
        for row, other in zip(rows, others, strict=True)
    ]


def _prefill_first(read: Make) -> Make:
    """Decode rows take their slots from where prefill rows stand (story 2)."""

    def broken(self: RecurrentInputs, rows: Sequence[BatchRow]) -> object:
        prefill = len(rows) - sum(row.is_decode for row in rows)
        return read(self, _with_states_of(rows, [*rows[prefill:], *rows[:prefill]]))

    return broken


def _swapped(read: Make) -> Make:
    """The first two decode rows read and write each other's states."""

    def broken(self: RecurrentInputs, rows: Sequence[BatchRow]) -> object:
        others = list(rows)
        if sum(row.is_decode for row in rows) > 1:
            others[:2] = rows[1], rows[0]
        return read(self, _with_states_of(rows, others))

    return broken


def _decode_out_of_place(attend: Make) -> Make:
    """Outputs of decode rows are put one row further."""

    def broken(
        self: Lightning, q: object, k: object, v: object, step: StepInput, view: object
    ) -> Tensor:
        out: Tensor = attend(self, q, k, v, step, view)
        for at, _ in step[LightningState].decode:
            out[at] = out[at].roll(1, 0)
        return out

    return broken


def _undecayed_carry(attend: Make) -> Make:
    """The first token of a tile sees the state before it undecayed."""

    def broken(
        q: object, state: object, keys: object, values: object, weights: Tensor, carry: Tensor
    ) -> object:
        once = weights.amax(-1, keepdim=True) * carry / carry.clamp_min(1e-30)
        shifted = torch.cat((once[:, :1], carry[:, :-1]), dim=1) if carry.shape[1] > 1 else carry
        return attend(q, state, keys, values, weights, shifted)

    return broken


def _rounded(allocate: Make) -> Make:
    """States in bfloat16 where float32 was asked for."""
    return lambda self, num_slots: allocate(replace(self, dtype=torch.bfloat16), num_slots)


def _any_snapshot(find: Make) -> Make:
    """Where a prefix has no snapshot, the last state of some sequence is taken for it."""

    def broken(self: SlotPool, value: bytes) -> int | None:
        found: int | None = find(self, value)
        return found if found is not None else next(iter(self._place_of.values()), None)

    return broken


def _late_snapshot(row_state: Make) -> Make:
    """A snapshot is the state after one token less than its name says."""

    def broken(self: States, request: object, start: int, end: int, num_drafts: int = 0) -> object:
        made = row_state(self, request, start, end, num_drafts)
        moved = tuple((max(start + 1, p - 1), slot) for p, slot in made.snapshots)
        return msgspec.structs.replace(made, snapshots=moved)

    return broken


def _first_heads(_: Make) -> property:
    """Every rank takes the slopes of rank 0."""

    def slopes(self: LightningSpec) -> tuple[float, ...]:
        factor = self._factor(self.layer)
        return tuple(s * factor for s in head_slopes(self.heads.total)[: self.heads.count])

    return property(slopes)


_L = "ling"

STATE_FAULTS = [
    Fault("state-not-cleared", "a new sequence goes on from a stranger's state", "poison", _L,
          Running("lightning"), "prepare_prefill", _other_row(_not_cleared)),
    Fault("state-left-by-others", "a slot just freed is not cleared", "steady state", _L,
          Running("lightning"), "prepare_prefill", _other_row(_not_cleared)),
    Fault("state-cleared-again", "a continued chunk starts from zeros", "split = whole", _L,
          Running("lightning"), "prepare_prefill", _other_row(_cleared_again)),
    Fault("state-slots-prefill-first", "decode slots taken at prefill offsets (story 2)",
          "solo = batch", _L, RecurrentInputs, "read", _prefill_first),
    Fault("state-rows-shifted", "decode outputs put one row further (story 2)", "solo = batch", _L,
          Lightning, "_attend", _decode_out_of_place),
    Fault("states-swapped", "two requests have each other's state", "solo = batch", _L,
          RecurrentInputs, "read", _swapped),
    Fault("tile-boundary-decay", "decay off by one at a tile boundary", "engine oracle", _L,
          lightning, "_attend", _undecayed_carry),
    Fault("state-rounded", "bfloat16 states where float32 was asked", "engine oracle", _L,
          LightningState, "allocate", _rounded),
    Fault("state-of-longer-prefix", "the last state serves a shorter prefix", "prefix = cold", _L,
          Pool, "find", _any_snapshot),
    Fault("snapshot-one-early", "a snapshot lacks its last token", "prefix = cold", _L,
          States, "row_state", _late_snapshot),
    Fault("engine-rank-slopes", "rank 1 decays with the slopes of rank 0", "ranks = one",
          "ling-ranks", LightningSpec, "slopes", _first_heads),
    Fault("ranks-not-added", "what the ranks computed is not added up", "ranks = one",
          "ling-ranks", ThreadRank, "all_reduce", lambda add: lambda self, x: (add(self, x), x)[1]),
    Fault("one-rope-for-all", "all layers rotate by the first layer's table", "engine oracle", _L,
          Ropes, "at", lambda at: lambda self, p: [at(self, p)[0]] * len(self.of_layer)),
]  # fmt: skip
