"""The facts of a short convolution: u = B ∘ x', y = C ∘ (Σ_j w_j u_{t-taps+1+j}), where B, C and x'
are projections of the layer's normalised input, and w has one weight per channel and tap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from trueline.spec.mixer import CacheField, Divide, MixerSpec
from trueline.spec.parameters import Parameter, Piece, divided, output
from trueline.spec.source import Span


@dataclass(frozen=True, kw_only=True)
class ConvSpec(MixerSpec):
    label: ClassVar[str] = "short_conv"

    channels: Span
    taps: int

    @property
    def cache_fields(self) -> tuple[CacheField, ...]:
        return (CacheField("conv_tail", (self.taps - 1) * self.channels.count, "sequence"),)

    def divided(self, part: Divide) -> Self:
        return replace(self, channels=part(self.channels, "the number of convolved channels"))

    def whole(self) -> Self:
        return replace(self, channels=Span.whole(self.channels.total))

    def parameters(self, name: str, hidden: int, outputs: Span | None) -> Iterator[Parameter]:
        channels, matrix = self.channels, f"{name}.in_proj.weight"
        rows = Piece(
            matrix, (3 * channels.total, hidden), (slice(channels.start, channels.stop),), runs=3
        )
        yield Parameter(matrix, (3 * channels.count, hidden), "matrix", (rows,))
        yield divided(f"{name}.conv.weight", (channels, self.taps), 0)
        yield output(f"{name}.o_proj.weight", hidden, channels, outputs)
