"""What a parameter is: its shape on this rank, and the checkpoint tensors that fill it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Literal

from trueline.spec.source import Span

ParameterKind = Literal[
    "embedding",
    "head",
    "norm",
    "norm_bias",
    "matrix",
    "router",
    "correction_bias",
    "index_weights",
    "compressor",
    "position_bias",
    "sinks",
    "hc_fn",
    "hc_base",
    "hc_scale",
    "expert_ids",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor, the part of it that this rank takes, and where it goes."""

    source: str
    shape: tuple[int, ...]
    """As stored, before any division."""
    take: tuple[slice, ...] = ()
    put: tuple[int | slice, ...] = ()
    runs: int = 1
    """Equal runs along the last axis of `take` that are divided alike, as Q, K and V of one matrix;
    `take` is of the first."""

    def split(self) -> Iterator[Piece]:
        """One piece per run."""
        if self.runs == 1:
            yield self
            return
        *outer, rows = self.take
        height, count = self.shape[len(outer)] // self.runs, rows.stop - rows.start
        every = (slice(None),) * len(outer)
        for run in range(self.runs):
            first = run * height + rows.start
            take, put = slice(first, first + count), slice(run * count, (run + 1) * count)
            yield replace(self, take=(*outer, take), put=(*every, put), runs=1)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    pieces: tuple[Piece, ...]
    fused: Piece | None = None
    """The same parameter stored as one tensor, as transformers' in-memory names have it."""
    active_share: Fraction = Fraction(1)
    """How much of it one token multiplies: top_k of all experts, nothing of a looked-up table."""
    below: int | None = None
    """Of integers: each is from 0 up and below this."""
    unit_columns: bool = False
    """Whether each column is divided by its length over all stored rows."""

    @property
    def count(self) -> int:
        return prod(self.shape)


def times(span: Span, width: int) -> Span:
    return Span(span.start * width, span.stop * width, span.total * width)


def plain(name: str, shape: tuple[int, ...], kind: ParameterKind) -> Parameter:
    return Parameter(name, shape, kind, (Piece(name, shape),))


def divided(
    name: str, dims: tuple[Span | int, ...], dim: int, kind: ParameterKind = "matrix"
) -> Parameter:
    """A tensor of which this rank holds a run of rows (dim 0) or columns (dim 1)."""
    span = dims[dim]
    assert isinstance(span, Span)
    shape = tuple(d.count if isinstance(d, Span) else d for d in dims)
    stored = tuple(d.total if isinstance(d, Span) else d for d in dims)
    take = (slice(None),) * dim + (slice(span.start, span.stop),)
    return Parameter(name, shape, kind, (Piece(name, stored, take=take),))


def output(name: str, D: int, inner: Span, outputs: Span | None) -> Parameter:
    """Back to the hidden size: a part of every channel's sum, or the whole sum of some channels. A
    rank that has all that is summed over needs nobody: it has the whole sum of all."""
    if outputs is None or inner.is_whole:
        return divided(name, (D, inner), 1)
    return divided(name, (outputs, inner.total), 0)
