"""A loaded parameter: how its numbers are stored, and where they stand in it.

A weight is made of parts, each one stored matrix or a cut of it. Cutting and concatenating only
move the parts' edges, so nothing is ever quantised again and every number keeps its own scale,
wherever blocks end. Numbers are read from the file when they are dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from trueline.spec.source import Span
from trueline.weights.formats import Stored
from trueline.weights.formats.dense import DENSE, DenseStored

# Dequantised in runs of this many numbers, so that float32 copies stay small.
CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredPart:
    stored: Stored
    format: str
    """The label of its format."""
    begin: tuple[int, ...]
    """Of its first number in the weight. The weight may have more dims, all in front."""
    read: Callable[[], None] | None = None
    """Called when its numbers have been read; None where they are in memory of their own."""
    reading: Callable[[int], None] | None = None
    """Called as well with the bytes of each run of them, where they are read in runs."""

    @property
    def size(self) -> tuple[int, ...]:
        """Along each dim of the weight."""
        return (1,) * self._leading + self.stored.shape

    @property
    def _leading(self) -> int:
        return len(self.begin) - len(self.stored.shape)

    @property
    def where(self) -> tuple[int | slice, ...]:
        """Index into the weight."""
        bounds = zip(self.begin, self.size, strict=True)
        slices = tuple(slice(begin, begin + size) for begin, size in bounds)
        return (*self.begin[: self._leading], *slices[self._leading :])

    def cut(self, axis: int, start: int, stop: int) -> StoredPart | None:
        """What falls between two edges of the weight, in a weight that begins at the first."""
        begin, size = self.begin[axis], self.size[axis]
        low, high = max(begin, start), min(begin + size, stop)
        if low >= high:
            return None
        stored = self.stored
        if axis >= self._leading:
            stored = stored.cut(axis - self._leading, low - begin, high - begin)
        return replace(self.moved(axis, low - start - begin), stored=stored)

    def moved(self, axis: int, by: int) -> StoredPart:
        begin = (*self.begin[:axis], self.begin[axis] + by, *self.begin[axis + 1 :])
        return replace(self, begin=begin)

    def at(self, index: int) -> StoredPart | None:
        """What the first dim holds at an index, as a part of a weight without that dim."""
        part = self.cut(0, index, index + 1)
        if part is None:
            return None
        stored = part.stored
        if part._leading == 0:
            assert isinstance(stored, DenseStored), "experts in one tensor are plain float"
            stored = DenseStored(stored.numbers[0])
        return replace(part, stored=stored, begin=part.begin[1:])


@dataclass(frozen=True, slots=True)
class Weight:
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What its numbers are rounded to, once, where they are dequantised."""
    parts: tuple[StoredPart, ...]
    home: torch.device = torch.device("cpu")  # noqa: RUF009
    """Where its parts are, and are dequantised."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    """Where its numbers are wanted."""

    def __post_init__(self) -> None:
        off = prod(self.shape) - sum(prod(part.size) for part in self.parts)
        if off:  # the ledger balanced, so this is our own bug
            raise AssertionError(f"weight {list(self.shape)}: {off} numbers are not filled once")

    @classmethod
    def of(cls, numbers: Tensor) -> Weight:
        """A plain tensor, in memory of its own."""
        part = StoredPart(DenseStored(numbers), DENSE.label, (0,) * numbers.dim())
        return cls(tuple(numbers.shape), numbers.dtype, (part,), numbers.device, numbers.device)

    @classmethod
    def concat(cls, weights: Sequence[Weight], axis: int = 0) -> Weight:
        """Parts stay as they are: their blocks need not line up, nor their formats be equal."""
        first, at = weights[0], 0
        like = first.dtype, first.home, first.device
        parts: list[StoredPart] = []
        for weight in weights:
            assert (weight.dtype, weight.home, weight.device) == like, "one weight is of one kind"
            parts += [part.moved(axis, at) for part in weight.parts]
            at += weight.shape[axis]
        shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
        return replace(first, shape=shape, parts=tuple(parts))

    def cut(self, axis: int, span: Span) -> Weight:
        assert span.total == self.shape[axis], f"{span} of {self.shape[axis]}"
        cuts = (part.cut(axis, span.start, span.stop) for part in self.parts)
        shape = (*self.shape[:axis], span.count, *self.shape[axis + 1 :])
        return replace(self, shape=shape, parts=tuple(part for part in cuts if part is not None))

    def stacked(self, count: int) -> Weight:
        """[count, rows / count, columns]: of a matrix, rows that follow each other."""
        rows = self.shape[0] // count
        parts: list[StoredPart] = []
        for part in self.parts:
            begin, stop = part.begin[0], part.begin[0] + part.size[0]
            for at in range(begin // rows, -(-stop // rows)):
                cut = part.cut(0, at * rows, (at + 1) * rows)
                assert cut is not None, "the range has no others"
                # its file's pages are given back after the last
                read = part.read if (at + 1) * rows >= stop else None
                parts.append(replace(cut, begin=(at, *cut.begin), read=read))
        return replace(self, shape=(count, rows, *self.shape[1:]), parts=tuple(parts))

    def unstack(self) -> Iterator[Weight]:
        """Of stacked matrices, one after the other."""
        held: list[list[StoredPart]] = [[] for _ in range(self.shape[0])]
        for part in self.parts:  # looked at once: experts are many, and each has parts of its own
            for index in range(part.begin[0], part.begin[0] + part.size[0]):
                held[index].append(part)
        for index, several in enumerate(held):
            parts = (part.at(index) for part in several)
            kept = tuple(part for part in parts if part is not None)
            yield replace(self, shape=self.shape[1:], parts=kept)

    @property
    def format(self) -> str:
        """The one of all its parts. A mixture is dense: nothing but plain numbers fits all."""
        formats = {part.format for part in self.parts}
        return formats.pop() if len(formats) == 1 else DENSE.label

    @property
    def nbytes(self) -> int:
        """As stored."""
        return sum(part.stored.nbytes for part in self.parts)

    def to(self, device: torch.device) -> Weight:
        """Wanted there: an op that packs it moves what it keeps, dequantised or as stored."""
        return replace(self, device=device)

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, each rounded once, to the weight's dtype unless another is wanted."""
        dtype = dtype or self.dtype
        first = self.parts[0]
        if len(self.parts) == 1 and first.read is None and isinstance(first.stored, DenseStored):
            return first.stored.numbers.view(self.shape).to(self.device, dtype)
        value = torch.empty(self.shape, dtype=dtype, device=self.home)
        for part in self.parts:
            target, at = value[part.where], 0
            for numbers in runs(part.stored):
                target[at : at + len(numbers)] = numbers
                at += len(numbers)
                if part.reading:
                    part.reading(part.stored.nbytes * len(numbers) // len(target))
            if part.read:
                part.read()
        return value.to(self.device)


def runs(stored: Stored) -> Iterator[Tensor]:
    """The numbers, some rows at a time; each run lives until the next is asked for."""
    rows, *rest = stored.shape
    step = max(CHUNK // max(prod(rest), 1), 1)
    for start in range(0, rows, step):
        yield stored.cut(0, start, min(start + step, rows)).dequantise()


def dense(weight: Weight | Tensor) -> Tensor:
    """For an op that multiplies with plain numbers. A tensor is its own dense weight."""
    return weight if isinstance(weight, Tensor) else weight.dequantise()


def unstack(weights: Weight | Tensor) -> Iterator[Weight | Tensor]:
    """For an op that packs stacked matrices one by one."""
    yield from weights if isinstance(weights, Tensor) else weights.unstack()
