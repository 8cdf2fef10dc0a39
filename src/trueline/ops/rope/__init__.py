"""Rotation: `table(rope, max_position)` -> cos, sin [positions, dim/2], exactly float32 in the
order of RopeSpec; `run(x [n, heads, dim], cos [n, dim/2], sin, pairing)` -> a new tensor. The
argument is never written."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trueline.ops.capabilities import CPU, GPU, NATIVE, Capabilities
from trueline.spec.rope import Pairing, RopeSpec


def inv_freq(rope: RopeSpec) -> Tensor:
    """The frequencies, lifted to float32 as every consumer must."""
    exponents, ramp = (torch.tensor(v, dtype=torch.float32) for v in (rope.exponents, rope.ramp))
    frequencies: Tensor = rope.inv_freq(exponents, ramp)
    return frequencies


def table(rope: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for these positions; a finer table would be a different function."""
    angle = positions.to(torch.float32)[:, None] * inv_freq(rope)
    return angle.cos() * rope.cos_sin_scale, angle.sin() * rope.cos_sin_scale


class Rope(Protocol):
    capabilities: Capabilities

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor: ...


IMPLEMENTATIONS = {"native": NATIVE, "cpu": CPU, "reference": CPU, "triton": GPU}
