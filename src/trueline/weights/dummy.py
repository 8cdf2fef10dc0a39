"""Random weights without a file. Each is drawn from a generator of its own, seeded by (seed, name):
the same numbers whatever else is in the model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.spec.parameters import ParameterKind
from trueline.weights.load import FLOAT32_KINDS
from trueline.weights.value import Weight

# What is left of a drawn correction bias, so that it does not choose the experts.
EVEN = 0.01


class DummyWeights:
    """Weights that spread routing over all experts, each drawn, on the device, when it is taken."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters(spec)}
        self._dtype, self._device, self._seed = dtype, device, seed

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def pop(self, name: str) -> Weight:
        parameter = self._parameters.pop(name)
        value = draw(name, parameter.shape, parameter.kind, self._seed, self._device)
        if parameter.kind == "correction_bias":
            value *= EVEN  # a checkpoint's bias evens out what its router prefers: ours has none
        dtype = torch.float32 if parameter.kind in FLOAT32_KINDS else self._dtype
        return Weight.of(value.to(dtype))


def draw(
    name: str,
    shape: tuple[int, ...],
    kind: ParameterKind,
    seed: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Tensor:
    """float32. Another device has other numbers."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    if kind in ("norm", "correction_bias"):
        between = torch.rand(shape, generator=generator, device=device)
        return 0.5 + between if kind == "norm" else 0.4 * between - 0.2
    numbers = torch.randn(shape, generator=generator, device=device)
    if kind == "embedding":
        return numbers
    if kind == "norm_bias":
        return 0.5 * numbers
    gain = {"router": 1.5, "head": 1.5}.get(kind, 1.0)
    return numbers.mul_(gain / math.sqrt(shape[-1]))
