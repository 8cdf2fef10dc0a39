"""The recurrent state of linear attention: a matrix per head and sequence, on this rank's heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from trueline.cache.index import DTYPES
from trueline.cache.kinds import KindContext, SlottedKind
from trueline.cache.state import StateStore, StateView
from trueline.errors import UsageError
from trueline.spec.mixer import LightningSpec
from trueline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningState(SlottedKind[StateView]):
    name: ClassVar[str] = "lightning"
    label: ClassVar[str | None] = "states"
    layers: tuple[int, ...]
    heads: int
    dim: int
    """Of keys and of values."""
    dtype: torch.dtype
    tail: int
    """Positions whose keys and values are kept beside a state: bits must not depend on cuts."""

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> LightningState | None:
        layers = {
            i: layer.mixer
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, LightningSpec)
        }
        if not layers:
            return None
        first = next(iter(layers.values()))
        if any(mixer.cache_fields != first.cache_fields for mixer in layers.values()):
            raise UsageError(f"{spec.family}: linear layers with states of different widths")
        wanted = context.config.mamba_cache_dtype
        return cls(
            layers=tuple(layers),
            heads=first.heads.count,
            dim=first.head_dim,
            dtype=context.weights if wanted == "auto" else DTYPES[wanted],
            tail=context.tile,
        )

    def __str__(self) -> str:
        return f"{self.slot_bytes / 1e6:,.2f} MB a slot in {self.dtype}".replace("torch.", "")

    @property
    def slot_bytes(self) -> int:
        layers = len(self.layers)
        return StateStore.slot_bytes(layers, self.heads, self.dim, self.dim, self.dtype, self.tail)

    def allocate(self, num_slots: int) -> StateStore:
        layers = len(self.layers)
        return StateStore(layers, num_slots, self.heads, self.dim, self.dim, self.dtype, self.tail)
