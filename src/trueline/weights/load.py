"""A checkpoint's parameters as weights: memory-mapped, each byte read once.

Pages are given back to the system as soon as a tensor has been dequantised, so that host memory
never holds much more than the model itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from trueline.errors import CheckpointError
from trueline.spec.model import ModelSpec
from trueline.spec.parameters import Parameter, Piece
from trueline.weights.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from trueline.weights.formats import Stored
from trueline.weights.ledger import Use
from trueline.weights.rank_ledger import Held, HeldTensor, Wanted, slices_of, wanted_pieces
from trueline.weights.value import CHUNK, StoredPart, Weight, runs

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# What decides which experts run and which keys are seen: never rounded below float32.
# Neither is what is added to logits, nor what weighs the streams of hyper-connections.
FLOAT32_KINDS = (
    "router",
    "correction_bias",
    "index_weights",
    "position_bias",
    "sinks",
    "hc_fn",
    "hc_base",
    "hc_scale",
)
# Serving engines' lower bound of the length of a column of lm_head.
SHORTEST_COLUMN = 1e-7
# Linux takes no more of one call than it reads ahead, of which this is the default.
ASKED_AT_ONCE = 128 << 10
# Where memory is short, pages that nobody has read yet are the first to go, and come twice.
AHEAD = 128 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class Files:
    """The checkpoint's files, mapped when first touched."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                # Copy-on-write, because torch wants writable memory; nobody writes.
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    def view(self, stored: StoredTensor) -> Tensor:
        """The stored numbers, without a copy where their alignment allows it."""
        dtype = TORCH_DTYPES[stored.dtype]
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        data = torch.frombuffer(
            self._map(stored.file), dtype=torch.uint8, offset=stored.begin, count=stored.nbytes
        )
        if stored.begin % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(stored.shape)

    def prefetch(self, held: HeldTensor) -> Iterator[int]:
        """Ask for the pages of a slice before they are read: else the system reads ahead, by
        megabytes where it is set so, and with them what other ranks hold. Yields how many
        bytes it has asked for, as often as it asks."""
        if not held.nbytes or not hasattr(mmap, "MADV_WILLNEED"):
            return
        file = self._map(held.tensor.file)
        for first, last in held.pages(mmap.PAGESIZE):
            for at in range(first, last, ASKED_AT_ONCE):
                length = min(ASKED_AT_ONCE, last - at)
                file.madvise(mmap.MADV_WILLNEED, at, length)
                yield length

    def release(self, use: Use) -> None:
        """Give the pages that lie wholly inside a weight's tensors, scales among them, back to the
        system."""
        page = mmap.PAGESIZE
        for stored in use.tensors:
            first = -(-stored.begin // page) * page
            length = stored.end // page * page - first
            if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
                self._map(stored.file).madvise(mmap.MADV_DONTNEED, first, length)


class Ahead:
    """Asks for the pages of a parameter's parts, in the order in which they are read, so far ahead
    that storage never waits, and no further."""

    def __init__(self, files: Files, parts: Sequence[Held]) -> None:
        self._asking = {
            number: chain.from_iterable(map(files.prefetch, held.tensors))
            for number, held in enumerate(parts)
        }
        self._asked = dict.fromkeys(self._asking, 0)
        """Of each, and not read yet."""
        self._ask()

    def reading(self, number: int, nbytes: int) -> None:
        """So many bytes of this part have been read."""
        self._asked[number] = max(self._asked[number] - nbytes, 0)
        self._ask()

    def read(self, number: int) -> None:
        self._asking.pop(number, None)
        self._asked[number] = 0
        self._ask()

    def _ask(self) -> None:
        total = sum(self._asked.values())
        while self._asking and total < AHEAD:
            number = next(iter(self._asking))
            length = next(self._asking[number], None)
            if length is None:
                del self._asking[number]
            else:
                self._asked[number] += length
                total += length


class StoredWeights:
    """The parameters of a checkpoint. Their numbers are read when they are dequantised, so that
    whoever packs one and lets it go never holds all of them twice. Names are those of
    `models/parameters.py`, iterated in file order."""

    def __init__(
        self,
        model: Path,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        progress: Progress | None = None,
        only: tuple[str, ...] = ("",),
    ) -> None:
        """`only`: how the names begin of those that there will be."""
        checkpoint = open_checkpoint(model)
        if checkpoint is None:
            raise CheckpointError(f"{model}: no *.safetensors files; accepted: a model directory")
        self._dtype, self._progress = dtype, progress
        self._files = Files()
        self._uses: dict[str, list[Wanted]] = {}
        for wanted in wanted_pieces(checkpoint, spec, only):
            self._uses.setdefault(wanted.parameter.name, []).append(wanted)
        uses = (wanted.use for several in self._uses.values() for wanted in several)
        self._total = sum(use.tensor.nbytes for use in uses)
        self._read: set[str] = set()
        self._done = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._uses)

    def pop(self, name: str) -> Weight:
        pieces = self._uses.pop(name)
        parameter = pieces[0].parameter
        found = [
            (placed(stored, wanted.use.format.label, put), wanted.use, held)
            for wanted in pieces
            for held, (stored, put) in zip(
                slices_of(wanted), opened(self._files, wanted), strict=True
            )
        ]
        found.sort(key=lambda each: each[0].begin)
        ahead = Ahead(self._files, [held for _, _, held in found])
        parts = tuple(
            replace(
                part,
                reading=partial(ahead.reading, number),
                read=partial(self._finish, use, part.stored, partial(ahead.read, number)),
            )
            for number, (part, use, _) in enumerate(found)
        )
        return Weight(parameter.shape, held_dtype(parameter, self._dtype), parts)

    def _finish(self, use: Use, stored: Stored, told: Callable[[], None]) -> None:
        """Numbers are checked while their pages are there."""
        tensor = use.tensor
        use.format.check(use.tensors, stored)
        self._files.release(use)
        told()
        if tensor.name in self._read:  # another run of its rows came before
            return
        self._read.add(tensor.name)
        self._done += tensor.nbytes
        if self._progress:
            self._progress(self._done, self._total)


def held_dtype(parameter: Parameter, plain: torch.dtype) -> torch.dtype:
    """Where the model's other numbers are `plain`."""
    if parameter.below is not None:
        return torch.int64
    return torch.float32 if parameter.kind in FLOAT32_KINDS else plain


def load_weights(
    model: Path, spec: ModelSpec, *, dtype: torch.dtype, progress: Progress | None = None
) -> dict[str, Tensor]:
    """All parameters of `spec` (whole, or one rank's), dequantised."""
    stored = StoredWeights(model, spec, dtype=dtype, progress=progress)
    return {name: stored.pop(name).dequantise() for name in list(stored)}


def stream_weights(
    checkpoint: Checkpoint, spec: ModelSpec, progress: Progress | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's numbers with the name they are stored under, in runs; each lives until the next
    is asked for."""
    pieces = wanted_pieces(checkpoint, spec)
    total = sum(wanted.use.tensor.nbytes for wanted in pieces)
    done = 0
    files = Files()
    for wanted in pieces:
        for held, (stored, _) in zip(slices_of(wanted), opened(files, wanted), strict=True):
            for _ in chain.from_iterable(map(files.prefetch, held.tensors)):
                pass
            wanted.use.format.check(wanted.use.tensors, stored)
            for numbers in runs(stored):
                yield wanted.piece.source, numbers
        files.release(wanted.use)
        done += wanted.use.tensor.nbytes
        if progress:
            progress(done, total)


def opened(files: Files, wanted: Wanted) -> Iterator[tuple[Stored, tuple[int | slice, ...]]]:
    """What is wanted of a stored tensor, and where it goes in the parameter."""
    use, values = wanted.use, [files.view(tensor) for tensor in wanted.use.tensors]
    whole: Stored = use.format.open(use.tensors, values)
    if wanted.parameter.below is not None:
        check_integers(use.tensor, values[0], wanted.parameter.below)
    if wanted.parameter.unit_columns:
        whole = UnitColumns(values[0], column_lengths(values[0]))
    yield from taken_from(whole, wanted.piece)


def check_integers(tensor: StoredTensor, values: Tensor, below: int) -> None:
    if values.numel() and not 0 <= (least := int(values.min())) <= int(values.max()) < below:
        found = least if least < 0 else int(values.max())
        raise CheckpointError(f"{tensor}: holds {found}; accepted: 0 to {below - 1}")


def taken_from(whole: Stored, piece: Piece) -> Iterator[tuple[Stored, tuple[int | slice, ...]]]:
    """What this rank has of a stored tensor, and where it goes in the parameter."""
    for run in piece.split():
        stored = whole
        for axis, taken in enumerate(run.take):
            start, stop, _ = taken.indices(stored.shape[axis])
            stored = stored.cut(axis, start, stop)
        yield stored, run.put


def placed(stored: Stored, label: str, put: tuple[int | slice, ...]) -> StoredPart:
    leading = [at for at in put if isinstance(at, int)]
    inside = [at.start or 0 for at in put if isinstance(at, slice)]
    rest = len(stored.shape) - len(inside)
    return StoredPart(stored, label, (*leading, *inside, *(0,) * rest))


@dataclass(frozen=True, slots=True)
class UnitColumns:
    """Rows whose columns are divided by their lengths over *all* stored rows."""

    numbers: Tensor
    lengths: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def cut(self, axis: int, start: int, stop: int) -> UnitColumns:
        assert axis == 0, "a rank has some words, and all channels of each"
        return replace(self, numbers=self.numbers[start:stop])

    def dequantise(self) -> Tensor:
        return self.numbers.double() / self.lengths


def column_lengths(stored: Tensor) -> Tensor:
    step = max(CHUNK // stored.shape[1], 1)
    squares = torch.zeros(stored.shape[1], dtype=torch.float64)
    for start in range(0, len(stored), step):
        squares += stored[start : start + step].double().square().sum(0)
    return squares.sqrt().clamp_min(SHORTEST_COLUMN)
