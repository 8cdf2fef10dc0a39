"""How big a model is: parameters, and what each token and each sequence costs in cache."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.models.parameters import parameters
from trueline.spec.mixer import MLASpec
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
    """Per kind of mixer, over all its layers, at the model's dtype."""
    width = DTYPE_BYTES[spec.dtype]
    layers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, MLASpec)]
    if not layers:
        return []

    def total(per: str) -> int:
        fields = (field for mixer in layers for field in mixer.cache_fields)
        return width * sum(field.width for field in fields if field.per == per)

    return [CacheCost("mla", len(layers), total("token"), total("sequence"))]
