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
        self.tables = [torch.stack(table(rope, places)).to(device) for rope in self.different]

    def at(self, positions: Tensor) -> list[Rope]:
        """Per layer, the rows of these positions."""
        rows = [rows_of(each, positions) for each in self.tables]
        return [None if index is None else rows[index] for index in self.of_layer]

    def table(self, rope: RopeSpec) -> Tensor:
        """For `rows_of` other positions than the step's."""
        return self.tables[self.different.index(rope)]


def rows_of(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [n, dim/2] each, in one launch."""
    cos, sin = table.index_select(1, positions)
    return cos, sin
