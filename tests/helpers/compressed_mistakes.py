"""Mistakes in the ops of compressed entries: functions that take a right one and give a wrong
one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueline.cache.tails import TailView

Function = Callable[..., Any]


def halves_swapped(run: Function) -> Function:
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


def first_slots_counted(prepare: Function) -> Function:
    """Window 0 has the slots of a window before it."""

    def broken(*given: Any) -> Any:
        made = prepare(*given)
        return replace(made, missing=torch.zeros_like(made.missing))

    return broken


def no_bias(run: Function) -> Function:
    return lambda *given, ape, **named: run(*given, ape=torch.zeros_like(ape), **named)


def not_rotated(run: Function) -> Function:
    def broken(*given: Any, cos: Tensor, sin: Tensor, **named: Any) -> Any:
        return run(*given, cos=torch.ones_like(cos), sin=torch.zeros_like(sin), **named)

    return broken


def entries_of_the_count(run: Function) -> Function:
    """The last bit depends on how many tokens share the step."""
    return lambda u, *given, **named: run(u, *given, **named) * (1 + 2.0**-22 * (len(u) % 7))


def seen(early: int) -> Callable[[Function], Function]:
    """An entry is visible so many tokens early; below zero, late."""

    def make(prepare: Function) -> Function:
        def broken(rows: Any, *given: Any, ratio: int, **named: Any) -> Any:
            made = prepare(rows, *given, ratio=ratio, **named)
            if made.entries is None:
                return made
            at = [run.start + 1 + i for run in rows.runs for i in range(run.count)]
            lengths = (torch.tensor(at) + early) // ratio
            return replace(made, entries=replace(made.entries, lengths=lengths))

        return broken

    return make


def window_of(change: int) -> Callable[[Function], Function]:
    def make(prepare: Function) -> Function:
        return lambda *given, size, **named: prepare(*given, size=size + change, **named)

    return make


def no_sink(run: Function) -> Function:
    return lambda *given, sinks, **named: run(
        *given, sinks=torch.full_like(sinks, -torch.inf), **named
    )


def sink_as_value(run: Function) -> Function:
    """The sink's share is added to the sum, with a value of one."""

    def broken(*given: Any, sinks: Tensor, **named: Any) -> Any:
        out = run(*given, sinks=sinks, **named)
        without = run(*given, sinks=torch.full_like(sinks, -torch.inf), **named)
        share = 1 - out.norm(dim=-1) / without.norm(dim=-1)
        return out + share[..., None]

    return broken


def no_lists(run: Function) -> Function:
    """All entries are attended to, whatever was chosen."""
    return lambda *given, chosen, **named: run(*given, chosen=None, **named)
