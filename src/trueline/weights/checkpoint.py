"""What lies in a checkpoint's files: names, dtypes, shapes, byte ranges. Reads headers only.

A safetensors file is 8 bytes of length, a JSON header, then tensor bytes without gaps. Everything
that a truncated or edited file can break is checked here, before a byte of weights is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeGuard

from trueline.errors import CheckpointError, ConfigError
from trueline.spec.fields import read_json
from trueline.utils.model_files import WEIGHT_INDEX, WEIGHTS

DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    """Absolute byte range in `file`."""

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.file.name}: '{self.name}' {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(directory: Path) -> Checkpoint | None:
    """All tensors of a model directory; None where it holds no weight files."""
    if not directory.is_dir():
        return None
    index = directory / WEIGHT_INDEX
    weight_map = _read_index(index) if index.is_file() else None
    if weight_map is not None:
        files = tuple(directory / name for name in sorted(set(weight_map.values())))
    else:
        files = tuple(sorted(directory.glob(f"*{WEIGHTS}")))
    if not files:
        return None
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{tensor}: the same name stands in {tensors[tensor.name].file.name} too; "
                    "each tensor may stand once"
                )
            tensors[tensor.name] = tensor
    if weight_map is not None:
        _check_index(index, weight_map, tensors)
    return Checkpoint(directory, files, tensors)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise CheckpointError(
            f"{index}: 'weight_map' is missing or odd; accepted: tensor name -> name of a file "
            "beside the index"
        )
    return weight_map


def _check_index(
    index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index}: '{name}' should be in {file}, which does not hold it")
        if tensors[name].file.name != file:
            raise CheckpointError(f"{tensors[name]}: the index puts it in {file}")
    extra = sorted(tensors.keys() - weight_map.keys())
    if extra:
        raise CheckpointError(f"{tensors[extra[0]]}: not listed in {index.name}")


def read_header(file: Path) -> Iterable[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: truncated or not safetensors: the header should take {length} bytes, "
                    f"the file has {size}"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: not readable ({error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: corrupt header ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt header: not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = [_entry(file, start, name, entry) for name, entry in header.items()]
    _check_coverage(file, start, size, tensors)
    return tensors


def _entry(file: Path, start: int, name: str, entry: object) -> StoredTensor:
    def bad(why: str) -> CheckpointError:
        return CheckpointError(f"{file}: '{name}': corrupt header entry: {why}")

    if not isinstance(entry, dict):
        raise bad("not a JSON object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"dtype {dtype!r}; accepted: {', '.join(DTYPE_BITS)}")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise bad(f"shape {shape!r}, data_offsets {offsets!r}; accepted: lists of integers >= 0")
    begin, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if (end - begin) * 8 != bits:
        raise bad(f"{dtype} {shape} takes {bits / 8:g} bytes, data_offsets give {end - begin}")
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=file,
        begin=start + begin,
        end=start + end,
    )


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(file: Path, start: int, size: int, tensors: list[StoredTensor]) -> None:
    """Tensors follow each other without gaps or overlaps, up to the end of the file."""
    at = start
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            raise CheckpointError(
                f"{tensor}: starts at byte {tensor.begin} where {at} is expected: "
                "tensors must follow each other without gaps"
            )
        at = tensor.end
    if at != size:
        fault = "truncated" if size < at else "holds bytes that no tensor owns"
        raise CheckpointError(f"{file}: {fault}: tensors end at byte {at}, the file at {size}")
