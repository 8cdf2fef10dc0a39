"""Mistakes of one rank in the steps of requests: what it draws, which slots and blocks it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from torch import Tensor

from trueline.cache.slots import StateSlots
from trueline.engine.messages import StepMessage
from trueline.engine.results import SampledTokens
from trueline.engine.runner import Runner
from trueline.layers.decoder import Decoder
from trueline.ops.sampling import SamplingState, build_rows
from trueline.parallel.collective import ThreadRank
from trueline.plan.plan import Plan
from trueline.spec.model import ModelSpec
from trueline.verify.faults import Fault, Make
from trueline.verify.faults.ranks import is_not_the_first

FEW_BLOCKS = 2


def _own_draws(sample: Make) -> Make:
    """A rank draws with a seed of its own, and goes on with what it has drawn."""

    def broken(self: Runner, logits: Tensor, states: list[SamplingState]) -> SampledTokens:
        ranks = self.decoder.collective
        if not isinstance(ranks, ThreadRank):
            right: SampledTokens = sample(self, logits, states)
            return right
        seeded = [replace(state, seed=state.seed + ranks._rank) for state in states]
        drawn = self.sampling.sample(logits, build_rows(seeded, self.plan.device.torch))
        return SampledTokens(drawn.tokens, drawn.bad, None)

    return broken


def _with_states(changed: Callable[[StateSlots], StateSlots]) -> Make:
    """Ranks but the first use other slots than they were told."""

    def patch(launch: Make) -> Make:
        def broken(self: Runner, step: StepMessage) -> object:
            if is_not_the_first(self.decoder.collective):
                rows = [
                    msgspec.structs.replace(row, state=changed(row.state)) if row.state else row
                    for row in step.rows
                ]
                step = msgspec.structs.replace(step, rows=rows)
            return launch(self, step)

        return broken

    return patch


def _not_restored(state: StateSlots) -> StateSlots:
    """After a prefix hit it goes on from its own slot, and not from the snapshot."""
    source = None if state.source is None else state.slot
    return msgspec.structs.replace(state, source=source)


def _one_slot(state: StateSlots) -> StateSlots:
    """A slot that was freed too early has gone to another request."""
    source = None if state.source is None else 0
    return msgspec.structs.replace(state, slot=0, source=source, snapshots=())


def _late_tables(launch: Make) -> Make:
    """The block tables of the step before, where they have as many blocks."""
    last: WeakKeyDictionary[Runner, list[list[list[int]]]] = WeakKeyDictionary()

    def broken(self: Runner, step: StepMessage) -> object:
        given = [row.tables for row in step.rows]
        before = last.get(self, [])
        last[self] = given
        if is_not_the_first(self.decoder.collective):
            late = [*before, *given[len(before) :]]
            rows = [
                msgspec.structs.replace(row, tables=tables) if _fits(tables, row.tables) else row
                for row, tables in zip(step.rows, late, strict=False)
            ]
            step = msgspec.structs.replace(step, rows=rows)
        return launch(self, step)

    return broken


def _fits(tables: list[list[int]], wanted: list[list[int]]) -> bool:
    return all(len(mine) >= len(asked) for mine, asked in zip(tables, wanted, strict=True))


def _own_number_of_blocks(init: Make) -> Make:
    """A rank allocates the blocks that it has memory for; the scheduler hands out more."""

    def broken(self: Runner, spec: ModelSpec, plan: Plan, decoder: Decoder, **options: Any) -> None:
        if is_not_the_first(decoder.collective):
            groups = tuple(replace(each, num_blocks=FEW_BLOCKS) for each in plan.groups)
            plan = replace(plan, groups=groups)
        init(self, spec, plan, decoder, **options)

    return broken


_STEPS, _V3, _L = "ranks = one, requests", "v3-ranks", "ling-ranks"

RANK_STEP_FAULTS = [
    Fault("ranks-draw-apart", "each rank draws by itself", _STEPS, _V3,
          Runner, "_sample", _own_draws),
    Fault("state-restored-on-the-first", "a snapshot is restored on the first rank only", _STEPS,
          _L, Runner, "launch", _with_states(_not_restored)),
    Fault("slot-freed-on-a-rank", "a slot freed on a rank too early has two owners there", _STEPS,
          _L, Runner, "launch", _with_states(_one_slot)),
    Fault("rank-tables-late", "a rank has the block tables of the step before", _STEPS, _V3,
          Runner, "launch", _late_tables),
    Fault("rank-fewer-blocks", "a rank has fewer blocks than are handed out", _STEPS, _V3,
          Runner, "__init__", _own_number_of_blocks),
]  # fmt: skip
