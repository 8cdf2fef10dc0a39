"""What every layer gets at construction, and what every forward gets of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.ops.latent_write import Parts
from trueline.ops.lightning import StateRow
from trueline.ops.mla_decode import DecodeRows, DecodeTable
from trueline.ops.mla_prefill import PrefillRow
from trueline.parallel.collective import Collective, Sums
from trueline.plan.plan import Plan
from trueline.weights.formats.dense import DENSE
from trueline.weights.value import Weight


class Ops:
    """The chosen implementation of each op."""

    def __init__(self, plan: Plan) -> None:
        self.linear: Any = plan.op("linear")
        self.head_product: Any = plan.op("head_product")
        self.mlp: Any = plan.op("mlp")
        self.rms_norm: Any = plan.op("rms_norm")
        self.rope: Any = plan.op("rope")
        self.latent_write: Any = plan.op("latent_write")
        self.parts = Parts(self.rms_norm, self.rope)
        self.mla_decode: Any = plan.op("mla_decode")
        self.mla_prefill: Any = plan.op("mla_prefill")
        self.lightning: Any = plan.op("lightning") if plan.slots else None
        self.linear_inputs: Any = plan.op("linear_inputs") if plan.slots else None
        self.gated_norm: Any = plan.op("gated_norm") if plan.slots else None
        sparse = plan.kind(IndexKeys) is not None
        self.index_write: Any = plan.op("index_write") if sparse else None
        self.index_scores: Any = plan.op("index_scores") if sparse else None
        self.top_positions: Any = plan.op("top_positions") if sparse else None
        self.sparse_mla: Any = plan.op("sparse_mla") if sparse else None
        self.route: Any = plan.op("route")
        self.experts: Any = plan.op("experts")


@dataclass(frozen=True, slots=True)
class Packing:
    """The ops that keep weights, as chosen for how these are stored."""

    linear: Any
    mlp: Any
    experts: Any


@dataclass(frozen=True, slots=True)
class Build:
    plan: Plan
    ops: Ops
    collective: Collective
    sums: Sums

    def packing(self, *weights: Weight) -> Packing:
        """For weights that one op packs together: what fits all of them."""
        formats = {weight.format for weight in weights}
        stored = formats.pop() if len(formats) == 1 else DENSE.label
        return Packing(*(self.plan.op(op, stored) for op in ("linear", "mlp", "experts")))


class Parameters(Protocol):
    """By name; read or drawn before, or when they are taken."""

    def pop(self, name: str, /) -> Weight: ...

    def __iter__(self) -> Iterator[str]: ...


class Weights:
    """Parameters, handed out once: whoever packs one frees the plain copy."""

    def __init__(
        self,
        values: Parameters,
        compute: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._values, self._compute, self._device = values, compute, device

    def take(self, name: str) -> Tensor:
        """In the dtype of computation, or float32 where it is kept exact."""
        value = self.stored(name).dequantise()
        return value if value.dtype == torch.float32 else value.to(self._compute)

    def stored(self, name: str) -> Weight:
        """As it is, for ops that pack: weights may be smaller than what is computed in."""
        return self._values.pop(name).to(self._device)

    def left(self) -> list[str]:
        return list(self._values)


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Where a prefill row's tokens stand among the step's tokens."""

    tokens: slice
    row: PrefillRow
    chosen: int = 0
    """The first one's row among those that choose what they see, if they do."""


Rope = tuple[Tensor, Tensor] | None
"""cos and sin of the step's positions; None for a layer that does not rotate."""


class Mixer(Protocol):
    """A layer's token mixing. `views` is what it keeps, by state kind."""

    def forward(self, x: Tensor, step: StepInput, views: LayerViews, rope: Rope) -> Tensor: ...


class FeedForward(Protocol):
    """Returns the output, and the experts chosen where there are any. `forced`: choices to take
    instead."""

    def forward(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class StateStep:
    """The same tokens for mixers with a state per sequence: decode rows first, one token each."""

    num_decode: int
    prepared: Any  # what lightning made of the decode rows
    prefill: tuple[tuple[slice, StateRow], ...]


@dataclass(frozen=True, slots=True)
class Selected:
    """Rows that attend over lists of what they chose."""

    at: slice | Tensor  # where they stand among the step's tokens
    rows: slice | Tensor  # and among the rows that choose
    count: int
    prepared: Any  # what sparse_mla made of them


@dataclass(slots=True)
class SparseStep:
    """The tokens that see more positions than the indexer lets through."""

    at: slice | Tensor  # where they stand among the step's tokens
    lengths: Tensor  # [rows]
    scores: tuple[tuple[slice, Any], ...]
    """What index_scores made of them, some rows at a time."""
    selected: Selected | None
    masked: tuple[PrefillSlice, ...]
    """All others, which attend over everything and hide what they did not choose."""
    forced: list[Tensor]
    """Choices to take instead, layer by layer."""
    recorded: list[Tensor] = field(default_factory=list)
    chosen: Tensor | None = None
    """Positions [rows, topk] that the last layer with an indexer of its own chose."""

    @property
    def count(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's tokens: decode rows first, one token each, then prefill rows. Each part carries
    all it needs; nobody computes an offset."""

    tokens: Tensor  # [n]
    positions: Tensor  # [n]
    cells: Tensor  # [n] where each token's cache row goes
    decode: DecodeRows | DecodeTable
    decode_at: slice | Tensor
    """Where the rows of `decode` stand among the tokens."""
    prefill: tuple[PrefillSlice, ...]
    prepared: Any  # what mla_decode made of `decode`
    states: StateStep | None
    sparse: SparseStep | None

    @property
    def num_decode(self) -> int:
        return len(self.decode.lengths)
