"""The account of one rank: which slice of which stored tensor each of its parameters holds. From
headers alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.spec.parameters import Parameter, Piece
from trueline.weights.checkpoint import DTYPE_BITS, Checkpoint, StoredTensor
from trueline.weights.ledger import Use, balance

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stored tensor, and the parameter it belongs into."""

    use: Use
    parameter: Parameter
    piece: Piece


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What a rank holds of a stored tensor: codes, or their scales."""

    tensor: StoredTensor
    slices: Slices
    """Of its elements, along each axis."""

    @property
    def nbytes(self) -> int:
        return prod(_length(each) for each in self.slices) * DTYPE_BITS[self.tensor.dtype] // 8

    def byte_ranges(self) -> Iterator[tuple[int, int]]:
        """Of the file, in order; neighbours are one range."""
        size, shape = DTYPE_BITS[self.tensor.dtype] // 8, self.tensor.shape
        whole = len(shape)  # axes from here on are held whole: their elements are neighbours
        while whole and _length(self.slices[whole - 1]) == shape[whole - 1]:
            whole -= 1
        run = size * prod(shape[whole:])
        if not whole:
            yield self.tensor.begin, self.tensor.begin + run
            return
        *outer, last = self.slices[:whole]
        for row in _places(outer, shape):
            first = self.tensor.begin + (row * shape[whole - 1] + last.start) * run
            yield first, first + _length(last) * run

    def pages(self, page: int) -> Iterator[tuple[int, int]]:
        """The file's pages that hold them, as byte ranges that begin and end with a page."""
        low, span, gap = self._extent()
        # Rows of which no page lies wholly between two slices are one range, and are many.
        ranges = self.byte_ranges() if gap >= page else iter([(low, low + span)])
        begin = end = 0
        for first, last in ranges:
            if first // page * page > end:
                if end:
                    yield begin, end
                begin = first // page * page
            end = -(-last // page) * page
        if end:
            yield begin, end

    def _extent(self) -> tuple[int, int, int]:
        """The first byte of the file, the bytes from there to the last one, and the widest gap."""
        step = span = DTYPE_BITS[self.tensor.dtype] // 8
        low, gap = self.tensor.begin, 0
        for taken, size in zip(reversed(self.slices), reversed(self.tensor.shape), strict=True):
            low += taken.start * step
            if _length(taken) > 1:
                gap = max(gap, step - span)
            span += (_length(taken) - 1) * step
            step *= size
        return low, span, gap


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of one stored weight."""

    parameter: str
    weight: str
    """Its name in the table of `models/parameters.py`."""
    cut: Slices
    """The numbers of the weight, along each axis."""
    tensors: tuple[HeldTensor, ...]


def wanted_pieces(
    checkpoint: Checkpoint, spec: ModelSpec, only: tuple[str, ...] = ("",)
) -> list[Wanted]:
    """What this rank reads, in file order, of parameters whose names begin like one of `only`. The
    ledger must balance."""
    ledger = balance(checkpoint, spec, only)
    ledger.require_balanced(checkpoint)
    known = {
        piece.source: (parameter, piece)
        for parameter in parameters(spec)
        for piece in (*parameter.pieces, *([parameter.fused] if parameter.fused else []))
    }
    uses = (use for use in ledger.uses if use.piece.source in known)
    ordered = sorted(uses, key=lambda use: (use.tensor.file, use.tensor.begin))
    return [Wanted(use, *known[use.piece.source]) for use in ordered]


def held_slices(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[Held]:
    """Every slice that the rank with this local spec holds, in file order."""
    for wanted in wanted_pieces(checkpoint, spec):
        yield from slices_of(wanted)


def slices_of(wanted: Wanted) -> Iterator[Held]:
    """One for each run."""
    use = wanted.use
    for run in wanted.piece.split():
        cut = _ranges(run.take, wanted.piece.shape)
        slices = use.format.stored_slices(cut)
        if slices is None:  # of a package: a rank opens all of it
            slices = tuple(_ranges((), tensor.shape) for tensor in use.tensors)
        held = zip(use.tensors, slices, strict=True)
        tensors = tuple(HeldTensor(*each) for each in held)
        yield Held(wanted.parameter.name, run.source, cut, tensors)


def _ranges(take: Slices, shape: tuple[int, ...]) -> Slices:
    """With both ends, of every axis."""
    every = (*take, *(slice(None),) * (len(shape) - len(take)))
    bounds = (each.indices(size) for each, size in zip(every, shape, strict=True))
    return tuple(slice(start, stop) for start, stop, _ in bounds)


def _length(taken: slice) -> int:
    return int(taken.stop - taken.start)


def _places(outer: list[slice], shape: tuple[int, ...]) -> Iterator[int]:
    """Of all rows that these slices of the first axes have, counted through the tensor."""
    places = [0]
    for each, size in zip(outer, shape, strict=False):
        places = [at * size + i for at in places for i in range(each.start, each.stop)]
    yield from places
