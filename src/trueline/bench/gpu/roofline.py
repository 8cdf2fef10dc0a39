"""The bytes that a decode step must move at least, and how long the memory takes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueline.cache.kinds import AnyKind, PagedKind, SlottedKind
from trueline.models.parameters import parameters
from trueline.spec.model import DTYPE_BYTES, ModelSpec
from trueline.weights.formats import parameter_bytes, weight_bytes

READ = 4.39e12
"""Bytes a second that an H200's memory was measured to give."""
MULTIPLY, MULTIPLY_FP8 = 770e12, 1430e12
"""Operations a second in bfloat16 and in e4m3, likewise."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    weights: int
    """As stored: each once; of routed experts, those that a step is expected to choose."""
    cache: int
    """Of all requests."""

    @property
    def seconds(self) -> float:
        return (self.weights + self.cache) / READ


def decode_bytes(spec: ModelSpec, kinds: Sequence[AnyKind], batch: int, context: int) -> StepBytes:
    """Of one token for each of `batch` requests, which have `context` positions each."""
    itemsize = DTYPE_BYTES[spec.dtype]
    weights = 0.0
    for parameter in parameters(spec):
        # Some token multiplies it: tokens choose their experts evenly, and apart from each other.
        share = 1 - (1 - parameter.active_share) ** batch
        weights += float(share) * parameter_bytes(spec, parameter, itemsize, lambda *_: True)
    cache = sum(batch * _sequence_bytes(kind, context) for kind in kinds)
    return StepBytes(round(weights), round(cache))


def _sequence_bytes(kind: AnyKind, context: int) -> float:
    """What a query reads of its own sequence; a state is written too."""
    if isinstance(kind, SlottedKind):
        return 2 * kind.slot_bytes
    assert isinstance(kind, PagedKind)
    return kind.num_read(context) * kind.block_bytes / kind.block_size


def checkpoint_bytes(spec: ModelSpec) -> int:
    """Of a checkpoint's weights, as published."""
    return weight_bytes(spec, DTYPE_BYTES[spec.dtype], lambda *_: True)
