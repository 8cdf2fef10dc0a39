"""Mistakes in the ops of compressed entries: functions that take a right one and give a wrong one.
More of them are in trueline/verify/faults/compressed_ops.py: those that an engine can run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


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


def no_lists(run: Function) -> Function:
    """All entries are attended to, whatever was chosen."""
    return lambda *given, chosen, **named: run(*given, chosen=None, **named)


def one_scale(index: Function) -> Function:
    """Of the largest number of a row, not of each of its groups."""

    def broken(rows: Tensor) -> Any:
        made = index(rows)
        steps = made.abs().amax(-1, keepdim=True) / 8
        return torch.where(made.abs() < steps, torch.zeros_like(made), made)

    return broken
