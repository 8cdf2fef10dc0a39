"""Mistakes in the ops of compressed attention, in the implementations that an engine takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueline.cache.tails import TailView
from trueline.verify.faults import Fault, Make, Running


def halves_swapped(run: Make) -> Make:
    """The first half of the width goes into a window's own entry."""

    def broken(
        u: Tensor, z: Tensor, tails: TailView, *given: Any, ape: Tensor, **named: Any
    ) -> Any:
        if not tails.layout.overlap:
            return run(u, z, tails, *given, ape=ape, **named)
        dim = tails.layout.dim
        u, z, ape = (x.roll(dim, -1) for x in (u, z, ape))
        rolled = replace(tails, rows=tails.rows.roll(dim, -1))
        out = run(u, z, rolled, *given, ape=ape, **named)
        tails.rows.copy_(rolled.rows.roll(dim, -1))
        return out

    return broken


def first_slots_counted(prepare: Make) -> Make:
    """Window 0 has the slots of a window before it."""

    def broken(*given: Any) -> Any:
        made = prepare(*given)
        return replace(made, missing=torch.zeros_like(made.missing))

    return broken


def no_sink(run: Make) -> Make:
    return lambda *given, sinks, **named: run(
        *given, sinks=torch.full_like(sinks, -torch.inf), **named
    )


def sink_as_value(run: Make) -> Make:
    """The sink's share is added to the sum, with a value of one."""

    def broken(*given: Any, sinks: Tensor, **named: Any) -> Any:
        out = run(*given, sinks=sinks, **named)
        without = run(*given, sinks=torch.full_like(sinks, -torch.inf), **named)
        share = 1 - out.norm(dim=-1) / without.norm(dim=-1)
        return out + share[..., None]

    return broken


ORACLE, CASE = "engine oracle", "v4-small"

COMPRESSED_OP_FAULTS = [
    Fault("overlap-halves-swapped", "a window's own entry takes the first half of the width",
          ORACLE, CASE, Running("compress"), "run", halves_swapped),
    Fault("first-slots-counted", "window 0 pools the slots of a window before it", ORACLE, CASE,
          Running("compress"), "prepare", first_slots_counted),
    Fault("sink-dropped", "the softmax has no sink", ORACLE, CASE,
          Running("sink_attention"), "run", no_sink),
    Fault("sink-as-value", "the sink's share is added as a value of one", ORACLE, CASE,
          Running("sink_attention"), "run", sink_as_value),
]  # fmt: skip
