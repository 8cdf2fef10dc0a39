"""How big a model is: parameters, and what each token and each sequence costs in cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

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
    bytes_per_token: float
    state_bytes_per_sequence: int
    fields: Mapping[str, float]
    """Bytes by what is kept, of a token or of a sequence."""


def cache_costs(spec: ModelSpec) -> list[CacheCost]:
    """Per kind of mixer, over all its layers: what tokens keep at the model's dtype, states in
    float32. Mixers that keep something of every token come first."""
    by_kind: dict[str, list[MixerSpec]] = {}
    for layer in spec.layers:
        if layer.mixer.cache_fields:
            by_kind.setdefault(layer.mixer.kind, []).append(layer.mixer)
    costs = [_cost(kind, mixers, spec.dtype) for kind, mixers in by_kind.items()]
    return sorted(costs, key=lambda cost: cost.bytes_per_token == 0)


def _cost(kind: str, mixers: Sequence[MixerSpec], dtype: str) -> CacheCost:
    by_name: dict[tuple[str, str], Fraction] = {}
    for field in (field for mixer in mixers for field in mixer.cache_fields):
        itemsize = DTYPE_BYTES[dtype if field.in_model_dtype else "float32"]
        at = field.name, field.per
        by_name[at] = by_name.get(at, Fraction(0)) + Fraction(field.width * itemsize, field.tokens)
    token, sequence = (
        sum((size for (_, each), size in by_name.items() if each == per), Fraction(0))
        for per in ("token", "sequence")
    )
    fields = {name: _number(size) for (name, _), size in by_name.items()}
    return CacheCost(kind, len(mixers), _number(token), int(sequence), fields)


def _number(size: Fraction) -> float:
    """Entries of several tokens may take part of a byte of each."""
    return size.numerator if size.denominator == 1 else float(size)
