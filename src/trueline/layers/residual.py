"""The residual between layers: one stream that outputs are added to, or several that mix before
every sub-layer (hyper-connections)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trueline.layers.context import Build, Weights
from trueline.ops.hyper_connections import HyperConnections, Mixed
from trueline.ops.rms_norm import RMSNorm
from trueline.spec.model import HyperConnectionsSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Mixing:
    """Weights of hyper-connections, float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    @staticmethod
    def of(weights: Weights, name: str) -> Mixing:
        parts = (weights.take(f"{name}.{part}").float() for part in ("fn", "base", "scale"))
        return Mixing(*parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a sub-layer needs to read the residual."""

    norm: Tensor
    mixing: Mixing | None


class Stream(Protocol):
    """Of one step. Sub-layers take turns: one reads, and adds its output."""

    def read(self, entry: Entry) -> Tensor:
        """[n, hidden], normed."""

    def add(self, y: Tensor) -> None: ...

    def end(self) -> Tensor:
        """[n, hidden], before the final norm."""


class Residual(Protocol):
    def entry(self, weights: Weights, norm: str, mixing: str) -> Entry: ...

    def start(self, embedded: Tensor) -> Stream: ...


def residual_for(spec: ModelSpec, build: Build, weights: Weights) -> Residual:
    norm, eps = build.ops.rms_norm, spec.norm_eps
    if spec.hyper_connections is None:
        return Single(norm, eps)
    op = build.ops.hyper_connections
    assert op is not None, "the plan knows of hyper-connections"
    return Several(norm, eps, op, spec.hyper_connections, Mixing.of(weights, "model.hc_head"))


@dataclass(frozen=True, slots=True)
class Single:
    norm: RMSNorm
    eps: float

    def entry(self, weights: Weights, norm: str, mixing: str) -> Entry:
        return Entry(weights.take(f"{norm}.weight"), None)

    def start(self, embedded: Tensor) -> SingleStream:
        return SingleStream(self, embedded)


class SingleStream:
    """An output is added where the next norm reads it: in one op."""

    def __init__(self, residual: Single, h: Tensor) -> None:
        self.norm, self.eps, self.h = residual.norm, residual.eps, h
        self.y: Tensor | None = None

    def read(self, entry: Entry) -> Tensor:
        if self.y is None:
            return self.norm.run(self.h, entry.norm, self.eps)
        self.h, x = self.norm.run_sum(self.h, self.y, entry.norm, self.eps)
        return x

    def add(self, y: Tensor) -> None:
        self.y = y

    def end(self) -> Tensor:
        assert self.y is not None, "a model has layers"
        return self.h + self.y


@dataclass(frozen=True, slots=True)
class Several:
    norm: RMSNorm
    eps: float
    op: HyperConnections
    spec: HyperConnectionsSpec
    head: Mixing

    def entry(self, weights: Weights, norm: str, mixing: str) -> Entry:
        return Entry(weights.take(f"{norm}.weight"), Mixing.of(weights, mixing))

    def start(self, embedded: Tensor) -> SeveralStreams:
        return SeveralStreams(self, embedded)


class SeveralStreams:
    """An output is merged where the next sub-layer reads: in one op."""

    def __init__(self, residual: Several, embedded: Tensor) -> None:
        self.residual = residual
        # all begin as the embedding
        self.h = embedded[:, None].repeat(1, residual.spec.streams, 1)
        self.mixed: Mixed | None = None
        self.y: Tensor | None = None

    def read(self, entry: Entry) -> Tensor:
        residual, mixing = self.residual, entry.mixing
        assert mixing is not None
        given = (mixing.fn, mixing.base, mixing.scale)
        norm, norm_eps = residual.norm, residual.eps
        eps, iterations = residual.spec.eps, residual.spec.iterations
        if self.mixed is None:
            self.mixed = residual.op.mix(
                self.h, *given, norm_eps=norm_eps, eps=eps, iterations=iterations
            )
            return norm.run(self.mixed.x, entry.norm, norm_eps)
        self.h, self.mixed = residual.op.advance(
            *(self.h, self.output(), self.mixed, *given, entry.norm),
            norm=norm,
            norm_eps=norm_eps,
            eps=eps,
            iterations=iterations,
        )
        return self.mixed.x

    def add(self, y: Tensor) -> None:
        self.y = y

    def output(self) -> Tensor:
        """Of the sub-layer that read last."""
        assert self.y is not None, "a sub-layer that reads adds"
        return self.y

    def end(self) -> Tensor:
        residual = self.residual
        assert self.mixed is not None, "a model has layers"
        return residual.op.head(
            residual.op.merge(self.h, self.output(), self.mixed),
            residual.head.fn,
            residual.head.base,
            residual.head.scale,
            norm_eps=residual.eps,
            eps=residual.spec.eps,
        )
