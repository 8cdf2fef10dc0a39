"""Linear attention with one decay per head, λ = exp(-slope):

    S_t = λ S_{t-1} + k_tᵀ v_t        o_t = scale · q_t S_t

q and k [n, heads, dk], v [n, heads, dv], any strides, normed and rotated already; accumulated in
float32 at least; out [n, heads, dv] in q's dtype. `slopes` [heads] float32 and `scale` have no
default.

- `decode(q, k, v, view, prepared, slopes=…, scale=…)`: one token per row, for one row or more;
  `prepare(rows)` once a step. On a GPU `prepare` also takes a `StateTable`, whose numbers the host
  does not know: a captured graph serves any rows.
- `prefill(q, k, v, view, prepared, slopes=…, scale=…)`: the prefill rows of a step, none of which
  reads what another writes; `prepare_prefill(parts)` once a step. q, k and v have all tokens of the
  step; `parts` are (slice of tokens, row), and only those tokens of the output are written.

States are read and written in slots of the view (`cache/state.py`), in the view's form. Where that
has a tail, the bits of outputs and slots depend on the row's own tokens alone: not on decode or
prefill, the cuts between steps, the slots, or who shares the step. To that end the state is rounded
to what is stored at every multiple of the tail, and nowhere else; without a tail it is rounded
where it is written.

All sources are read before a slot is written. Written slots differ from each other, but for the
null slot, which padded rows name and nobody else reads; several rows may read one source; a source
is written by no row but the one whose slot it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from trueline.cache.state import StateView
from trueline.ops.capabilities import CPU, GPU, Capabilities
from trueline.ops.launch import copied


@dataclass(frozen=True, slots=True)
class StateRow:
    """`source` holds the state after `start` tokens; None, exactly for start = 0, means zeros
    whatever any slot holds. `slot` takes the state after the row's last token. A snapshot (p, slot)
    takes what a row that ended after p tokens would leave, start < p <= its end; a decode row has
    one at most."""

    start: int
    source: int | None
    slot: int
    snapshots: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert (self.source is None) == (self.start == 0), f"{self}: zeros exactly at the start"

    def writes(self, count: int) -> list[tuple[int, int]]:
        """(position, slot) of all it leaves, given its number of new tokens."""
        end = self.start + count
        for position, _ in self.snapshots:
            assert self.start < position <= end, f"{self}: no snapshot at {position} up to {end}"
        return [(end, self.slot), *self.snapshots]


@dataclass(frozen=True, slots=True)
class StateTable:
    """Decode rows on a device. None of them reads what another writes."""

    COLUMNS: ClassVar = ("starts", "sources", "slots", "snapshots")

    starts: Tensor  # [rows] int32; 0: from zeros, whatever the source holds
    sources: Tensor  # [rows] int32; the null slot for a row from zeros
    slots: Tensor  # [rows] int32; the null slot for a row that only fills the table up
    snapshots: Tensor  # [rows] int32; the null slot for none

    @classmethod
    def of(cls, rows: Sequence[StateRow], device: torch.device) -> StateTable:
        clash = clashing(rows)
        assert not clash, f"rows {clash} read what another writes: give prepare a list"
        return cls(*copied(cls.columns(rows).values(), device))

    @staticmethod
    def columns(rows: Sequence[StateRow]) -> dict[str, list[int]]:
        """The same for the host."""
        return {
            "starts": [row.start for row in rows],
            "sources": [row.source or 0 for row in rows],
            "slots": [row.slot for row in rows],
            "snapshots": [row.snapshots[0][1] if row.snapshots else 0 for row in rows],
        }


def clashing(rows: Sequence[StateRow]) -> list[int]:
    """Rows whose source is another row's slot."""
    writers = {row.slot: i for i, row in enumerate(rows) if row.slot}
    return [i for i, row in enumerate(rows) if row.source and writers.get(row.source, i) != i]


PrefillParts = Sequence[tuple[slice, StateRow]]
"""Rows of prefill, each with where its tokens stand among those of the step."""
Decode = TypeVar("Decode")
Prefill = TypeVar("Prefill")


class LightningAttention(Protocol[Decode, Prefill]):
    capabilities: Capabilities

    def prepare(self, rows: list[StateRow] | StateTable) -> Decode: ...

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        view: StateView,
        prepared: Decode,
        *,
        slopes: Tensor,
        scale: float,
    ) -> Tensor: ...

    def prepare_prefill(self, parts: PrefillParts) -> Prefill: ...

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        view: StateView,
        prepared: Prefill,
        *,
        slopes: Tensor,
        scale: float,
    ) -> Tensor: ...


IMPLEMENTATIONS = {"cpu": CPU, "reference": CPU, "triton": GPU}
