"""The recurrence, one token at a time, every head by itself, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.state import StateView
from trueline.ops.lightning import IMPLEMENTATIONS, PrefillParts, StateRow, StateTable

capabilities = IMPLEMENTATIONS["reference"]


@dataclass(frozen=True, slots=True)
class SlotContents:
    """A slot's contents, read."""

    state: Tensor  # [heads, dk, dv]
    tokens: list[tuple[Tensor, Tensor]]  # key and value of each token of the open tile


def prepare(rows: list[StateRow] | StateTable) -> list[StateRow]:
    assert not isinstance(rows, StateTable), "tables are for GPUs"
    return rows


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: list[StateRow],
    *,
    slopes: Tensor,
    scale: float,
) -> Tensor:
    held = [_read(view, row) for row in prepared]
    out = [
        _walk(q[i : i + 1], k[i : i + 1], v[i : i + 1], view, row, held[i], slopes)
        for i, row in enumerate(prepared)
    ]
    return (scale * torch.cat(out)).to(q.dtype)


def prepare_prefill(parts: PrefillParts) -> PrefillParts:
    return parts


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: PrefillParts,
    *,
    slopes: Tensor,
    scale: float,
) -> Tensor:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for at, row in prepared:
        out[at] = _prefill_row(q[at], k[at], v[at], view, row, slopes, scale)
    return out


def _prefill_row(
    q: Tensor, k: Tensor, v: Tensor, view: StateView, row: StateRow, slopes: Tensor, scale: float
) -> Tensor:
    return (scale * _walk(q, k, v, view, row, _read(view, row), slopes)).to(q.dtype)


def _read(view: StateView, row: StateRow) -> SlotContents:
    if row.source is None:
        return SlotContents(torch.zeros(view.state.shape[1:], dtype=torch.float64), [])
    count = row.start % view.tail if view.tail else 0
    keys, values = view.keys[row.source].double(), view.values[row.source].double()
    tokens = [(keys[:, i], values[:, i]) for i in range(count)]
    return SlotContents(view.state[row.source].double(), tokens)


def _walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    row: StateRow,
    held: SlotContents,
    slopes: Tensor,
) -> Tensor:
    """Token after token; writes every slot that is due."""
    writes = row.writes(len(q))
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    state = held.state
    for key, value in held.tokens:
        state = _next(state, key, value, slopes)
    for i in range(len(q)):
        key, value = k[i].double(), v[i].double()
        state = _next(state, key, value, slopes)
        out[i] = torch.einsum("hk,hkv->hv", q[i].double(), state)
        position = row.start + i + 1
        held = _hold(view, held, key, value, state, position)
        if not held.tokens:
            state = held.state
        for due, slot in writes:
            if due == position:
                _write(view, slot, held)
    return out


def _next(state: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    decay = torch.exp(-slopes.double())
    return decay[:, None, None] * state + torch.einsum("hk,hv->hkv", key, value)


def _hold(
    view: StateView, held: SlotContents, key: Tensor, value: Tensor, state: Tensor, position: int
) -> SlotContents:
    """What a slot holds after this token."""
    if not view.tail:
        return SlotContents(state, [])
    if position % view.tail == 0:
        return SlotContents(state.to(view.state.dtype).double(), [])
    return SlotContents(held.state, [*held.tokens, (key, value)])


def _write(view: StateView, slot: int, held: SlotContents) -> None:
    view.state[slot] = held.state
    view.keys[slot] = 0
    view.values[slot] = 0
    for i, (key, value) in enumerate(held.tokens):
        view.keys[slot, :, i] = key
        view.values[slot, :, i] = value
