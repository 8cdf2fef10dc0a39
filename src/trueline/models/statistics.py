"""How big a model is: parameters, and what each token and each sequence costs in cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueline.models.parameters import parameters
from trueline.spec.mixer import MixerSpec
from trueline.spec.model import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    total: int
    active: int
    """Multiplied for one token: all but the embedding table and the experts not chosen."""


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    table = list(parameters(spec))
    return ParameterCounts(
        total=sum(parameter.count for parameter in table),
        active=sum(int(parameter.count * parameter.active_share) for parameter in table),
    )


@dataclass(frozen=True, slots=True)
class CacheCost:
    kind: str
    layers: int
    bytes_per_token: int
    state_bytes_per_sequence: int


def cache_costs(spec: ModelSpec) -> list[CacheCost]:
    """Per kind of mixer, over all its layers: what tokens keep at the model's dtype, states in
    float32. Mixers that keep something of every token come first."""
    by_label: dict[str, list[MixerSpec]] = {}
    for layer in spec.layers:
        if layer.mixer.cache_fields:
            by_label.setdefault(layer.mixer.label, []).append(layer.mixer)
    costs = [
        CacheCost(
            label,
            len(mixers),
            DTYPE_BYTES[spec.dtype] * _width(mixers, "token"),
            DTYPE_BYTES["float32"] * _width(mixers, "sequence"),
        )
        for label, mixers in by_label.items()
    ]
    return sorted(costs, key=lambda cost: cost.bytes_per_token == 0)


def _width(mixers: Sequence[MixerSpec], per: str) -> int:
    fields = (field for mixer in mixers for field in mixer.cache_fields)
    return sum(field.width for field in fields if field.per == per)
