"""Builds what layers take from a batch: tensors on the plan's device, and what each state kind of
the model makes of the rows. Eager steps and captured ones differ in where the numbers come from:
lists of the host, or fixed buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueline.cache.kinds.inputs import Column, FixedRows, InputContext, KindInputs
from trueline.device import send
from trueline.engine.batch import Batch
from trueline.engine.caches import Caches
from trueline.layers.context import RecordedChoices, StepInput
from trueline.plan.plan import Plan


class Inputs:
    def __init__(self, plan: Plan, caches: Caches) -> None:
        self.plan, self.caches = plan, caches
        self.device = plan.device.torch
        self.block_sizes = [group.block_size for group in plan.groups]
        others = {
            kind.name: (caches.store(kind).views[0], caches.group(kind)) for kind in plan.kinds
        }
        self.kinds: dict[str, KindInputs[Any, Any]] = {
            kind.name: kind.inputs(
                InputContext(
                    view=caches.store(kind).views[0],
                    group=caches.group(kind),
                    others=others,
                    implementations={op: chosen.name for op, chosen in plan.selections.items()},
                    device=self.device,
                    tiling=plan.tiling,
                    batch_invariant=plan.batch_invariant,
                )
            )
            for kind in plan.kinds
        }

    def build(
        self,
        batch: Batch,
        tokens: Tensor,
        recorded: RecordedChoices | None = None,
        forced: RecordedChoices | None = None,
    ) -> StepInput:
        """Of an eager step. `tokens`: the batch's, with those that steps in flight have sampled."""
        cells = [self.tensor(each) for each in batch.cells]
        rows = {name: each.read(batch.rows) for name, each in self.kinds.items()}
        return StepInput(
            tokens, self.tensor(batch.positions), self._built(rows, cells), recorded, forced
        )

    def build_captured(
        self, tokens: Tensor, positions: Tensor, fixed: FixedRows, cells: Sequence[Tensor]
    ) -> StepInput:
        """Of a captured step: every tensor is a fixed buffer or made of one. `fixed` has the
        columns of all kinds."""
        rows = {name: each.read_fixed(_of(name, fixed)) for name, each in self.kinds.items()}
        return StepInput(tokens, positions, self._built(rows, cells))

    @property
    def columns(self) -> dict[str, Column]:
        """What captured steps keep of every token, for all kinds."""
        return {
            f"{name}.{column}": what
            for name, each in self.kinds.items()
            for column, what in each.columns.items()
        }

    def values(self, batch: Batch) -> dict[str, Sequence[int]]:
        """What `columns` hold in a captured step of this batch."""
        return {
            f"{name}.{column}": numbers
            for name, each in self.kinds.items()
            for column, numbers in each.values(batch.rows).items()
        }

    @property
    def limits(self) -> list[int]:
        """Numbers of positions up to which steps are captured apart; the last is the longest."""
        longest = self.plan.max_model_len
        found = {limit for each in self.kinds.values() for limit in each.limits}
        return [*sorted(limit for limit in found if limit < longest), longest]

    def _built(self, rows: dict[str, Any], cells: Sequence[Tensor]) -> dict[str, object]:
        return {name: each.build(rows[name], cells) for name, each in self.kinds.items()}

    def tensor(self, values: Sequence[int]) -> Tensor:
        """On the device; the host does not wait for it."""
        return send(torch.tensor(values, dtype=torch.long), self.device)


def _of(kind: str, fixed: FixedRows) -> FixedRows:
    own = f"{kind}."
    columns = {
        name.removeprefix(own): column
        for name, column in fixed.columns.items()
        if name.startswith(own)
    }
    return replace(fixed, columns=columns)
