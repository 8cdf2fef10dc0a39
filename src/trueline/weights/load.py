"""Stream a checkpoint into parameters: memory-mapped, each byte read once, in file order.

Pages are given back to the system as soon as a tensor has been copied, so that host memory never
holds much more than the model itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
# Router and correction bias decide which experts run: never rounded below float32.
FLOAT32_KINDS = ("router", "correction_bias")
# Dequantised in runs of this many numbers, so that float32 copies stay small.
CHUNK = 1 << 24
# Serving engines' floor for the length of a column of lm_head.
SHORTEST_COLUMN = 1e-7

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class _Files:
    """The checkpoint's files, mapped when first touched."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._maps: dict[Path, mmap.mmap] = {}

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            stream = self._stack.enter_context(file.open("rb"))
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


def stream_weights(
    checkpoint: Checkpoint, spec: ModelSpec, progress: Progress | None = None
) -> Iterator[tuple[Parameter, Piece, Tensor]]:
    """This rank's pieces, ready to be copied into `parameter[piece.put]`. A yielded tensor lives
    until the next one is asked for."""
    ledger = balance(checkpoint, spec)
    ledger.require_balanced(checkpoint)
    wanted = {
        piece.source: (parameter, piece)
        for parameter in parameters(spec)
        for piece in (*parameter.pieces, *([parameter.fused] if parameter.fused else []))
    }
    uses = sorted(
        (use for use in ledger.uses if use.piece.source in wanted),
        key=lambda use: (use.tensor.file, use.tensor.begin),
    )
    total = sum(use.tensor.nbytes for use in uses)
    done = 0
    with ExitStack() as stack:
        files = _Files(stack)
        for use in uses:
            parameter, piece = wanted[use.piece.source]
            for part in piece.split():
                yield from _chunks(files, use, parameter, part, spec)
            files.release(use.tensor)
            done += use.tensor.nbytes
            if progress:
                progress(done, total)


def _chunks(
    files: _Files, use: Use, parameter: Parameter, piece: Piece, spec: ModelSpec
) -> Iterator[tuple[Parameter, Piece, Tensor]]:
    stored = files.view(use.tensor)
    if parameter.unit_columns:
        at = 0
        for numbers in unit_columns(stored, piece.take[0]):
            yield parameter, _rows(piece, at, len(numbers)), numbers
            at += len(numbers)
        return
    if use.scale is None:
        yield parameter, piece, stored[piece.take]
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
        yield parameter, _rows(piece, start, len(part)), numbers


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


def load_weights(
    model: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """All parameters of `spec` (whole, or one rank's), by the names of `models/parameters.py`."""
    checkpoint = open_checkpoint(model)
    if checkpoint is None:
        raise CheckpointError(f"{model}: no *.safetensors files; accepted: a model directory")
    values = {
        parameter.name: torch.empty(
            parameter.shape,
            dtype=torch.float32 if parameter.kind in FLOAT32_KINDS else dtype,
            device=device,
        )
        for parameter in parameters(spec)
    }
    unwritten = {name: value.numel() for name, value in values.items()}
    for parameter, piece, numbers in stream_weights(checkpoint, spec, progress):
        target = values[parameter.name][piece.put]
        target.copy_(numbers)
        unwritten[parameter.name] -= target.numel()
    wrong = [name for name, count in unwritten.items() if count]
    if wrong:  # the ledger balanced, so this is our own bug
        raise AssertionError(f"parameters not filled exactly once: {wrong[:4]}")
    return values
