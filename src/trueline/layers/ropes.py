"""cos and sin: one table for all layers that rotate alike."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.rope import table
from trueline.spec.model import ModelSpec
from trueline.spec.rope import RopeSpec

Rope = tuple[Tensor, Tensor] | None
"""cos and sin of the step's positions; None for a layer that does not rotate."""


class Ropes:
    """One table for all layers that rotate alike. Every position once, exactly float32: rows are
    looked up, never computed again."""

    def __init__(self, spec: ModelSpec, max_position: int, device: torch.device) -> None:
        self.different: list[RopeSpec] = []
        ropes = [layer.mixer.rotation for layer in spec.layers]
        for rope in ropes:
            if rope is not None and rope not in self.different:
                self.different.append(rope)
        self.of_layer = [None if rope is None else self.different.index(rope) for rope in ropes]
        places = torch.arange(max_position)
        # on the CPU wherever they are used: another device has another cosine
        made = (table(rope, places) for rope in self.different)
        self.tables = [(cos.to(device), sin.to(device)) for cos, sin in made]

    def at(self, positions: Tensor) -> list[Rope]:
        """Per layer, the rows of these positions."""
        rows = [(cos[positions], sin[positions]) for cos, sin in self.tables]
        return [None if index is None else rows[index] for index in self.of_layer]

    def table(self, rope: RopeSpec) -> tuple[Tensor, Tensor]:
        """For rows at other positions than the step's."""
        return self.tables[self.different.index(rope)]
