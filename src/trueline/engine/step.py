"""What the scheduler hands out: the rows of a step, and where each keeps its state. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trueline.engine.request import Request


class StateSlots(msgspec.Struct, frozen=True):
    """Slots of the state cache, for models whose mixers keep a state per sequence. Within a step
    nobody else reads or writes what a row writes."""

    slot: int
    """The request's own: the state after the row's last token goes there."""
    source: int | None
    """Where the state before the row's first token is. None: there is none, start from zeros;
    exactly the rows with start 0. Otherwise `slot` itself, or a snapshot, not to be written."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(p, slot), p growing, start < p <= start + count: the state after the request's first p
    tokens goes to that slot as well."""


@dataclass(frozen=True, slots=True)
class Row:
    """Positions [start, start + count) of a request. Its `tables` belong to this row only
    until the scheduler is called again: build the batch before that."""

    request: Request
    start: int
    count: int
    is_decode: bool
    """It has history and its one token is the last known one: generating, or the tail of a
    prompt. All else is prefill, whatever its length."""
    samples: bool
    """It reaches the request's last token, so its logits give the next one."""
    state: StateSlots | None = None
    """None where the model keeps no state per sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Decode rows first, then prefill rows, each in scheduling order. The scheduler is the one
    place that decides it; engine/batch.py checks it."""

    rows: tuple[Row, ...]
    num_decode_rows: int
    num_tokens: int
    preempted: tuple[str, ...]
    """Requests that lost their blocks since the step before."""
