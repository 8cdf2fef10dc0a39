"""What the scheduler returns: the rows of a step, and where each keeps its state. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.cache.slots import StateSlots
from trueline.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Positions [start, start + count) of a request. The scheduler changes the request's `tables`
    in its next call: copy them before (LiveRequest.step_row)."""

    request: Request
    start: int
    count: int
    is_decode: bool
    """It has history and its one token is the last known one: generating, or the tail of a
    prompt; drafts may follow it. All else is prefill, whatever its length."""
    samples: bool
    """It reaches the request's last token, so its logits give the next one."""
    num_drafts: int = 0
    """Of `count`, the guesses after a decode row's one token."""
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
