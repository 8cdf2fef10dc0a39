"""What every layer gets at construction, and what every forward gets of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews, StateKind
from trueline.layers.ropes import Rope, Ropes
from trueline.ops.capabilities import Capabilities, Opaque
from trueline.ops.compress import CompressInto
from trueline.ops.experts import AddingExperts, InvariantExperts, SharedExperts
from trueline.ops.latent_write import Parts
from trueline.ops.mla_prefill import MaskedPrefill
from trueline.ops.mlp import InvariantMLP
from trueline.ops.registry import implementation
from trueline.parallel.collective import Collective, RowParallel
from trueline.parallel.placement import Replicated
from trueline.plan.plan import Plan
from trueline.weights.formats.dense import DENSE
from trueline.weights.value import Weight

Input = TypeVar("Input")

ANYWHERE = Capabilities(devices=("cpu", "cuda"), batch_invariant=True, capture=True)
"""Of a layer that is made of ops: they may refuse, it does not."""


class Ops:
    """The chosen implementation of each op; None where the model has no layer that needs it."""

    def __init__(self, plan: Plan) -> None:
        name = {op: choice.name for op, choice in plan.selections.items()}
        self.linear = implementation("linear", name["linear"])
        self.batched_gemm = implementation("batched_gemm", name["batched_gemm"])
        self.rms_norm = implementation("rms_norm", name["rms_norm"])
        self.rope = implementation("rope", name["rope"])
        self.parts = Parts(self.rms_norm, self.rope)
        self.route = implementation("route", name["route"])
        self.latent = LatentOps(name) if "mla_decode" in name else None
        self.recurrent = RecurrentOps(name) if "lightning" in name else None
        self.sparse = SparseOps(name) if "sparse_mla" in name else None
        self.compressed = CompressedOps(name) if "sink_attention" in name else None
        self.hyper_connections = (
            implementation("hyper_connections", name["hyper_connections"])
            if "hyper_connections" in name
            else None
        )


class LatentOps:
    """Of latent attention."""

    def __init__(self, name: Mapping[str, str]) -> None:
        self.latent_write = implementation("latent_write", name["latent_write"])
        self.mla_decode = implementation("mla_decode", name["mla_decode"])
        self.mla_prefill = implementation("mla_prefill", name["mla_prefill"])
        masked = "run_chosen" in self.mla_prefill.capabilities.optional
        self.masked_prefill = cast("MaskedPrefill[Opaque]", self.mla_prefill) if masked else None


class CompressedOps:
    """Of attention over a window and compressed entries; those of entries where there are any, and
    of numerics `published` where the plan has them."""

    def __init__(self, name: Mapping[str, str]) -> None:
        self.sink_attention = implementation("sink_attention", name["sink_attention"])
        self.sink_prepare = implementation("sink_prepare", name["sink_prepare"])
        self.compress = implementation("compress", name["compress"]) if "compress" in name else None
        into = self.compress and "run_into" in self.compress.capabilities.optional
        self.compress_into = cast("CompressInto[Opaque]", self.compress) if into else None
        chooses = "index_scores" in name
        self.index_scores = (
            implementation("index_scores", name["index_scores"]) if chooses else None
        )
        self.topk = implementation("topk", name["topk"]) if chooses else None
        rounds = "row_rounding" in name
        self.row_rounding = implementation("row_rounding", name["row_rounding"]) if rounds else None


class RecurrentOps:
    """Of layers with a recurrent state."""

    def __init__(self, name: Mapping[str, str]) -> None:
        self.lightning = implementation("lightning", name["lightning"])
        self.qkv_prepare = implementation("qkv_prepare", name["qkv_prepare"])
        self.gated_norm = implementation("gated_norm", name["gated_norm"])


class SparseOps:
    """Of layers with an indexer."""

    def __init__(self, name: Mapping[str, str]) -> None:
        self.index_write = implementation("index_write", name["index_write"])
        self.index_scores = implementation("index_scores", name["index_scores"])
        self.topk = implementation("topk", name["topk"])
        self.sparse_mla = implementation("sparse_mla", name["sparse_mla"])


class Packing:
    """The ops that keep weights, as chosen for how these are stored."""

    def __init__(self, plan: Plan, stored: str) -> None:
        chosen = plan.by_format.get(stored, plan.selections)
        self.linear = implementation("linear", chosen["linear"].name)
        self.mlp = implementation("mlp", chosen["mlp"].name)
        self.experts = implementation("experts", chosen["experts"].name)
        # The same objects, with more functions: declared, so nobody has to look.
        invariant = plan.batch_invariant
        self.invariant_mlp = cast("InvariantMLP[Opaque]", self.mlp) if invariant else None
        self.invariant_experts = (
            cast("InvariantExperts[Opaque]", self.experts) if invariant else None
        )
        optional = self.experts.capabilities.optional
        shared, adds = "pack_with_shared" in optional, "run_added" in optional
        self.shared_experts = cast("SharedExperts[Opaque]", self.experts) if shared else None
        self.adding_experts = cast("AddingExperts[Opaque]", self.experts) if adds else None


@dataclass(frozen=True, slots=True)
class Build:
    plan: Plan
    ops: Ops
    collective: Collective
    row_parallel: RowParallel
    ropes: Ropes

    def packing(self, *weights: Weight) -> Packing:
        """For weights that one op packs together: what fits all of them."""
        formats = {weight.format for weight in weights}
        return Packing(self.plan, formats.pop() if len(formats) == 1 else DENSE.label)

    def mixes_numerics(self, *weights: Weight) -> bool:
        """Whether activations are quantised for some of their formats only: no op may pack them
        together then."""
        formats = {part.format for weight in weights for part in weight.parts}
        return len(formats) > 1 and not formats.isdisjoint(self.plan.numerics.formats)


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


class Mixer(Protocol):
    """A layer's token mixing. `views` is what it keeps, by state kind."""

    def forward(
        self, x: Replicated, step: StepInput, views: LayerViews, rope: Rope
    ) -> Replicated: ...


class FeedForward(Protocol):
    """Returns the output, and the experts chosen where there are any. `forced`: choices to take
    instead."""

    def forward(self, x: Replicated, forced: Tensor | None) -> tuple[Replicated, Tensor | None]: ...


class HashedExperts(Protocol):
    """A layer whose experts come from a table of token ids."""

    def hashed(self, tokens: Tensor) -> Tensor | None:
        """[n, top_k], to be forced on it."""


@dataclass(slots=True)
class RecordedChoices:
    """Experts and positions that a step chose. Recorded, or forced: taken instead of choosing."""

    experts: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> expert ids [n, top_k]."""
    positions: list[Tensor] = field(default_factory=list)
    """Of each layer with an indexer of its own, [rows, topk] of the rows that chose."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's tokens: those of decode rows first, then those of prefill rows. What a layer must
    know of them beside their positions, it has from the kinds that it keeps: `step[Latent]`."""

    tokens: Tensor  # [n]
    positions: Tensor  # [n]
    kinds: Mapping[str, object]
    recorded: RecordedChoices | None = None
    forced: RecordedChoices | None = None

    def __getitem__(self, kind: type[StateKind[Any, Input]]) -> Input:
        return cast("Input", self.kinds[kind.name])
