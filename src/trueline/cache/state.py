"""The memory of recurrent states: a slot holds all that one sequence, or one snapshot of it, needs
to go on after its last token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from trueline.cache.parts import Part


@dataclass(frozen=True, slots=True)
class StateView:
    """One layer's slots, in one of two forms. Without a tail, `state` is the state after the last
    token. With a tail of n positions, `state` is the one at the last multiple of n, and the keys
    and values of the tokens since then lie beside it, zeros after them: what a slot holds depends
    on the tokens alone, not on how they were cut into steps. Slot 0 is the null slot."""

    state: Tensor  # [slots, heads, dk, dv]
    keys: Tensor  # [slots, heads, tail, dk]
    values: Tensor  # [slots, heads, tail, dv]

    @property
    def tail(self) -> int:
        return self.keys.shape[2]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.state, self.keys, self.values

    def write(self, slot: int, state: Tensor, keys: Tensor, values: Tensor) -> None:
        """state [heads, dk, dv] rounded to what is stored; keys and values [heads, open, d]."""
        self.state[slot] = state
        for part, tokens in ((self.keys, keys), (self.values, values)):
            part[slot, :, : tokens.shape[1]] = tokens
            part[slot, :, tokens.shape[1] :] = 0

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Whole slots; every source is read before any target is written."""
        for part in self.parts:
            part[targets] = part[sources]

    def clear(self, slots: Tensor) -> None:
        """What a sequence without tokens holds."""
        for part in self.parts:
            part[slots] = 0


class SlotShape(TypedDict):
    """Of one layer's part of a slot."""

    heads: int
    dk: int
    dv: int
    dtype: torch.dtype
    tail: int


class StateStore:
    """All layers' slots, allocated once. `tail` is the length of a tile in batch-invariant mode,
    a multiple of 8, and 0 otherwise."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        *,
        heads: int,
        dk: int,
        dv: int,
        dtype: torch.dtype,
        tail: int,
    ) -> None:
        assert tail % 8 == 0, f"a tail of {tail} positions is not a multiple of 8"
        # Not cleared: a slot is written before it is read, and untouched memory costs nothing.
        shape = (num_layers, num_slots, heads)
        self.state = torch.empty(*shape, dk, dv, dtype=dtype)
        self.keys = torch.empty(*shape, tail, dk, dtype=tail_dtype(dtype))
        self.values = torch.empty(*shape, tail, dv, dtype=tail_dtype(dtype))
        parts = zip(self.state, self.keys, self.values, strict=True)
        self.views = [StateView(*layer) for layer in parts]

    @staticmethod
    def slot_bytes(
        num_layers: int, *, heads: int, dk: int, dv: int, dtype: torch.dtype, tail: int
    ) -> int:
        state = dk * dv * dtype.itemsize
        open_tile = tail * (dk + dv) * tail_dtype(dtype).itemsize
        return num_layers * heads * (state + open_tile)

    def parts(self) -> list[Part]:
        """By head."""
        kept = {"state": self.state, "tail's keys": self.keys, "tail's values": self.values}
        return [Part.rows(name, each, each) for name, each in kept.items() if each.numel()]

    def randomise(self, slots: Sequence[int]) -> None:
        for slot in slots:
            for part in (self.state, self.keys, self.values):
                part[:, slot].normal_()

    def poison(self, slots: Iterable[int]) -> None:
        """Fill slots that nobody owns with NaN: a read of them shows in the results."""
        for slot in slots:
            for part in (self.state, self.keys, self.values):
                part[:, slot] = torch.nan


def tail_dtype(dtype: torch.dtype) -> torch.dtype:
    """Tokens of the open tile are never rounded: a cut would show."""
    return torch.promote_types(dtype, torch.float32)
