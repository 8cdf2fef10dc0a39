"""Rotary embedding: which dims rotate, how they pair, at which frequencies, at which magnitude.

The only owner of these facts. Frequencies are written once, for floats and for float32 tensors
alike: every float32 consumer lifts `exponents` and `ramp` and calls `inv_freq`, so that the table
is bit for bit the one the model was trained with (a float64 table is a different function).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trueline.spec.source import Spec

Pairing = Literal["interleaved", "half-split"]


def float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class YarnSpec(Spec):
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None
    apply_yarn_scaling: bool


@dataclass(frozen=True, kw_only=True)
class RopeSpec(Spec):
    dim: int
    """Rotated channels. For MLA all of qk_rope_head_dim, whatever partial_rotary_factor says."""
    pairing: Pairing
    """interleaved: channels (2i, 2i+1) share frequency i; half-split: channels (i, i + dim/2)."""
    base: float
    yarn: YarnSpec | None
    yarn_scales_magnitude: bool
    """False for DeepSeek-V4: YaRN moves its frequencies and nothing else."""

    DERIVED: ClassVar[Mapping[str, str]] = {
        "cos_sin_scale": "attention_factor, or get(mscale) / get(mscale_all_dim), or get(1); "
        "get(m) = 0.1 m ln(factor) + 1",
        "score_scale": "get(mscale_all_dim)²; multiplies the softmax scale",
        "correction_range": "YaRN's first and last blended frequency",
        "inv_freq_ends": "first and last of base^(-2i/dim), blended by YaRN",
    }

    @property
    def cos_sin_scale(self) -> float:
        """What cos and sin are multiplied by."""
        yarn = self.yarn
        if yarn is None or not self.yarn_scales_magnitude:
            return 1.0
        if yarn.attention_factor is not None:
            return yarn.attention_factor
        if yarn.mscale and yarn.mscale_all_dim:
            return yarn_magnitude(yarn.factor, yarn.mscale) / yarn_magnitude(
                yarn.factor, yarn.mscale_all_dim
            )
        return yarn_magnitude(yarn.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """What YaRN multiplies the softmax scale by: mscale², once, here."""
        yarn = self.yarn
        if yarn is None or not self.yarn_scales_magnitude or not yarn.apply_yarn_scaling:
            return 1.0
        if not yarn.mscale_all_dim:
            return 1.0
        return yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2

    @property
    def correction_range(self) -> tuple[float, float] | None:
        if self.yarn is None:
            return None
        low, high = (
            self.dim
            * math.log(self.yarn.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(self.base))
            for rotations in (self.yarn.beta_fast, self.yarn.beta_slow)
        )
        if self.yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, self.dim - 1)

    @property
    def exponents(self) -> tuple[float, ...]:
        return tuple(2 * i / self.dim for i in range(self.dim // 2))

    @property
    def ramp(self) -> tuple[float, ...]:
        """Share of interpolation per frequency: 0 keeps it, 1 divides it by `factor`."""
        if self.correction_range is None:
            return (0.0,) * (self.dim // 2)
        low, high = self.correction_range
        width = float32(high - low) if high != low else float32(high + 0.001 - low)
        steps = (float32(float32(i - float32(low)) / width) for i in range(self.dim // 2))
        return tuple(min(max(step, 0.0), 1.0) for step in steps)

    def inv_freq(self, exponents: Any, ramp: Any) -> Any:
        """Angle per position. One float or a whole float32 tensor; same operations, same order."""
        period = self.base**exponents
        if self.yarn is None:
            return 1.0 / period
        keep = 1 - ramp
        return 1.0 / (self.yarn.factor * period) * (1 - keep) + 1.0 / period * keep

    @property
    def inv_freq_ends(self) -> tuple[float, float]:
        first, last = (
            self.inv_freq(self.exponents[i], self.ramp[i]) for i in (0, self.dim // 2 - 1)
        )
        return first, last
