"""Stream a checkpoint into parameters: memory-mapped, each byte read once, in file order.

Pages are given back to the system as soon as a tensor has been copied, so that host memory never
holds much more than the model itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.errors import CheckpointError
from trueline.models.parameters import Parameter, Piece, parameters
from trueline.spec.model import BlockFp8, ModelSpec
from trueline.weights.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from trueline.weights.ledger import Use, balance

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# What decides which experts run and which keys are seen: never rounded below float32.
FLOAT32_KINDS = ("router", "correction_bias", "index_weights")
# Dequantised in runs of this many numbers, so that float32 copies stay small.
CHUNK = 1 << 24
# Serving engines' floor for the length of a column of lm_head.
SHORTEST_COLUMN = 1e-7

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class _Files:
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

    def release(self, stored: StoredTensor) -> None:
        """Give the pages that lie wholly inside this tensor back to the system."""
        page = mmap.PAGESIZE
        first = -(-stored.begin // page) * page
        length = stored.end // page * page - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map(stored.file).madvise(mmap.MADV_DONTNEED, first, length)


class StoredWeights:
    """The parameters of a checkpoint, each read when it is taken, so that whoever packs one and
    lets it go never holds all of them twice. Names are those of `models/parameters.py`, iterated
    in file order."""

    def __init__(
        self, model: Path, spec: ModelSpec, *, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        checkpoint = open_checkpoint(model)
        if checkpoint is None:
            raise CheckpointError(f"{model}: no *.safetensors files; accepted: a model directory")
        self._spec, self._dtype, self._progress = spec, dtype, progress
        self._files = _Files()
        self._uses: dict[str, list[Wanted]] = {}
        for wanted in wanted_pieces(checkpoint, spec):
            self._uses.setdefault(wanted.parameter.name, []).append(wanted)
        uses = (wanted.use for several in self._uses.values() for wanted in several)
        self._total = sum(use.tensor.nbytes for use in uses)
        self._done = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._uses)

    def pop(self, name: str) -> Tensor:
        pieces = self._uses.pop(name)
        parameter = pieces[0].parameter
        exact = parameter.kind in FLOAT32_KINDS
        value = torch.empty(parameter.shape, dtype=torch.float32 if exact else self._dtype)
        unwritten = value.numel()
        for wanted in pieces:
            for put, numbers in read_piece(self._files, wanted, self._spec):
                target = value[put]
                target.copy_(numbers)
                unwritten -= target.numel()
            self._done += wanted.use.tensor.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        if unwritten:  # the ledger balanced, so this is our own bug
            raise AssertionError(f"{name}: not filled exactly once: {unwritten} numbers off")
        return value


def load_weights(
    model: Path, spec: ModelSpec, *, dtype: torch.dtype, progress: Progress | None = None
) -> dict[str, Tensor]:
    """All parameters of `spec` (whole, or one rank's)."""
    stored = StoredWeights(model, spec, dtype=dtype, progress=progress)
    return {name: stored.pop(name) for name in list(stored)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stored tensor, and the parameter it belongs into."""

    use: Use
    parameter: Parameter
    piece: Piece


def wanted_pieces(checkpoint: Checkpoint, spec: ModelSpec) -> list[Wanted]:
    """What this rank reads, in file order. The ledger must balance."""
    ledger = balance(checkpoint, spec)
    ledger.require_balanced(checkpoint)
    known = {
        piece.source: (parameter, piece)
        for parameter in parameters(spec)
        for piece in (*parameter.pieces, *([parameter.fused] if parameter.fused else []))
    }
    uses = (use for use in ledger.uses if use.piece.source in known)
    ordered = sorted(uses, key=lambda use: (use.tensor.file, use.tensor.begin))
    return [Wanted(use, *known[use.piece.source]) for use in ordered]


def stream_weights(
    checkpoint: Checkpoint, spec: ModelSpec, progress: Progress | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's numbers with the name they are stored under, in runs; each lives until the next
    is asked for."""
    pieces = wanted_pieces(checkpoint, spec)
    total = sum(wanted.use.tensor.nbytes for wanted in pieces)
    done = 0
    files = _Files()
    for wanted in pieces:
        for _, numbers in read_piece(files, wanted, spec):
            yield wanted.piece.source, numbers
        done += wanted.use.tensor.nbytes
        if progress:
            progress(done, total)


def read_piece(
    files: _Files, wanted: Wanted, spec: ModelSpec
) -> Iterator[tuple[tuple[int | slice, ...], Tensor]]:
    """Numbers, and where they go in the parameter."""
    for part in wanted.piece.split():
        for piece, numbers in _chunks(files, wanted.use, wanted.parameter, part, spec):
            yield piece.put, numbers
    files.release(wanted.use.tensor)


def _chunks(
    files: _Files, use: Use, parameter: Parameter, piece: Piece, spec: ModelSpec
) -> Iterator[tuple[Piece, Tensor]]:
    stored = files.view(use.tensor)
    if parameter.unit_columns:
        at = 0
        for numbers in unit_columns(stored, piece.take[0]):
            yield _rows(piece, at, len(numbers)), numbers
            at += len(numbers)
        return
    if use.scale is None:
        yield piece, stored[piece.take]
        return
    assert isinstance(spec.storage, BlockFp8)
    scale = _scales(files.view(use.scale), use.scale, spec.storage)
    full = (*piece.take, *(slice(None),) * (2 - len(piece.take)))
    rows, columns = (
        torch.arange(*part.indices(size)) for part, size in zip(full, stored.shape, strict=True)
    )
    step = max(CHUNK // max(len(columns), 1), 1)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        numbers = dequantise(stored, scale, part, columns, spec.storage.block)
        yield _rows(piece, start, len(part)), numbers


def unit_columns(stored: Tensor, taken: slice) -> Iterator[Tensor]:
    """The taken rows, in runs, each column divided by its length over *all* rows."""
    step = max(CHUNK // stored.shape[1], 1)
    squares = torch.zeros(stored.shape[1], dtype=torch.float64)
    for start in range(0, len(stored), step):
        squares += stored[start : start + step].double().square().sum(0)
    lengths = squares.sqrt().clamp_min(SHORTEST_COLUMN)
    for start in range(taken.start, taken.stop, step):
        yield stored[start : min(start + step, taken.stop)].double() / lengths


def _rows(piece: Piece, start: int, count: int) -> Piece:
    """The same destination, narrowed to a run of its rows."""
    *outer, last = piece.put or (slice(0, None),)
    if isinstance(last, slice):
        begin = (last.start or 0) + start
        put = (*outer, slice(begin, begin + count))
    else:
        put = (*outer, last, slice(start, start + count))
    return Piece(piece.source, piece.shape, piece.take, put)


def _scales(scale: Tensor, stored: StoredTensor, storage: BlockFp8) -> Tensor:
    numbers = scale.to(torch.float32)
    if not bool(torch.isfinite(numbers).all()) or bool((numbers <= 0).any()):
        raise CheckpointError(f"{stored}: accepted: positive, finite scales")
    if storage.power_of_two_scales and bool((torch.frexp(numbers).mantissa != 0.5).any()):
        raise CheckpointError(f"{stored}: scale_fmt is ue8m0, but not all are powers of two")
    return numbers


def dequantise(
    weight: Tensor, scale: Tensor, rows: Tensor, columns: Tensor, block: tuple[int, int]
) -> Tensor:
    """weight × scale of its block, for these rows and columns (consecutive, any cut)."""
    corner = weight[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    scales = scale[rows // block[0]][:, columns // block[1]]
    return corner.to(torch.float32) * scales
