"""Quantised weights as they are stored, for tests of kernels that nobody launches: zeros."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.weights import dummy
from trueline.weights.dummy import DummyWeights
from trueline.weights.formats import format_of
from trueline.weights.value import Weight


class StoredZeros:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._quantised = {
            parameter.name
            for parameter in parameters(spec)
            if any(format_of(spec, parameter, piece) for piece in parameter.pieces)
        }
        replaced: Any = dummy
        replaced._generator = lambda *_: SimpleNamespace(device=device)
        replaced._draw_bytes = lambda shape, _: torch.zeros(shape, dtype=torch.uint8, device=device)
        replaced._draw_scales = lambda grid, *_: torch.zeros(grid, device=device)
        self._weights = DummyWeights(spec, dtype=dtype, device=device, seed=0)

    def __contains__(self, name: str) -> bool:
        return name in self._quantised

    def pop(self, name: str) -> Weight:
        return self._weights.pop(name)
