"""Quantised weights as the kernels multiply with them: codes as they are stored, in panels, with
their scales beside them. native/weights.h has the layout, and what codes and scales mean.

Scales are constant between *edges* of rows and of columns, those of the blocks or groups of all
parts. A panel whose halves lie between two edges of rows has one scale for each half; in the others
each column has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.native import library, panel
from trueline.weights.formats import Stored
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.formats.fp4 import Fp4, Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored, PackInt4
from trueline.weights.value import StoredPart, Weight

FORMATS = (BlockFp8.label, PackInt4.label, Fp4.label)
CODE_TYPES: tuple[type, ...] = (Fp8Stored, Int4Stored, Fp4Stored)
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
"""All in the order of their numbers in native/weights.h; uint8 is e8m0."""
FP8_UNIT = 256.0
"""The kernels read e4m3 as a 256th of what it means; its scales make up for it."""
HEADER, PLACE = 4, 3
"""Numbers of 8 bytes in front of the stops, and for each panel after them."""
ALIGNED = 64
NO_ROW = -1


def as_stored(*weights: Weight | Tensor) -> list[Weight]:
    """The weights, if all of them can be kept in one kind of codes; else none."""
    stored = [weight for weight in weights if isinstance(weight, Weight)]
    parts = [part.stored for weight in stored for part in weight.parts]
    alike = len({type(part) for part in parts}) == 1 and isinstance(parts[0], CODE_TYPES)
    fits = alike and len(stored) == len(weights) and all(map(_is_finite, parts))
    return stored if fits else []


def _is_finite(stored: Stored) -> bool:
    """With FP8_UNIT too: a scale of 2^120 leaves no room for it."""
    return not isinstance(stored, Fp8Stored) or bool(_scales(stored).isfinite().all())


def columns_of(rows: int) -> Tensor:
    """The row of each lane of the panels of a weight with so many rows."""
    return pad(torch.arange(rows), (0, -rows % panel()), value=NO_ROW)


def pairs_of(width: int) -> Tensor:
    """The same for gate over up: a half panel of each, so that one pass has both."""
    half = panel() // 2
    gate = pad(torch.arange(width), (0, -width % half), value=NO_ROW)
    up = torch.where(gate == NO_ROW, NO_ROW, gate + width)
    return torch.stack((gate.view(-1, half), up.view(-1, half)), dim=1).flatten()


def pack(weights: Sequence[Weight], lanes: Tensor, empty: Callable[..., Tensor]) -> Tensor:
    """Matrices of one shape and one kind of codes, one after the other, into memory that `empty`
    gives. `lanes` has the row of each lane of a matrix's panels."""
    layouts = [_Layout.of(weight, lanes) for weight in weights]
    stride = max(layout.bytes for layout in layouts)
    data = empty(len(weights), stride, dtype=torch.uint8)
    for weight, layout, to in zip(weights, layouts, data, strict=True):
        header = layout.header(stride)
        to[: len(header)] = header
        scales = layout.scales(weight)
        codes = _codes(weight)  # after which the pages of its file have been given back
        library().pack_scaled(
            *(codes.data_ptr(), scales.data_ptr(), lanes.data_ptr()),
            *(layout.scale_rows.data_ptr(), len(lanes) // panel(), weight.shape[1]),
            to.data_ptr(),
        )
    return data


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a packed matrix has what."""

    types: tuple[int, int]
    """Of codes and scales."""
    rows: Tensor
    columns: Tensor
    """Edges, the first and the last included."""
    scale_rows: Tensor
    """Of each row: which of the spaces between edges it is in."""
    places: Tensor
    """Of each panel: offsets of its scales and codes, and whether each column has its own scale."""
    bytes: int

    @classmethod
    def of(cls, weight: Weight, lanes: Tensor) -> _Layout:
        kind, dtype = type(weight.parts[0].stored), _scale_dtype(weight)
        rows, columns = (_edges(weight.parts, axis) for axis in (0, 1))
        begins = torch.zeros(weight.shape[0], dtype=torch.long)
        begins[rows[1:-1]] = 1
        scale_rows = begins.cumsum(0)
        by_column = _by_column(scale_rows, lanes)
        if kind is not Fp8Stored:
            by_column.fill_(True)
        runs, num_panels = len(columns) - 1, len(by_column)
        scales = torch.where(by_column, panel(), 2) * (runs * dtype.itemsize)
        codes = torch.full_like(scales, weight.shape[1] * panel())
        if kind is not Fp8Stored:
            codes //= 2
        sizes = torch.stack((scales, codes), dim=1)
        sizes = (sizes + ALIGNED - 1) // ALIGNED * ALIGNED
        begin = -(-8 * (HEADER + runs + PLACE * num_panels) // ALIGNED) * ALIGNED
        ends = begin + sizes.flatten().cumsum(0)
        offsets = (ends - sizes.flatten()).view(-1, 2)
        return cls(
            types=(CODE_TYPES.index(kind), SCALE_TYPES.index(dtype)),
            rows=rows,
            columns=columns,
            scale_rows=scale_rows,
            places=torch.cat((offsets, by_column[:, None]), dim=1),
            bytes=int(ends[-1]),
        )

    def header(self, stride: int) -> Tensor:
        """What stands in front, `stride` bytes before the next matrix."""
        stops = self.columns[1:]
        numbers = torch.tensor((*self.types, stride, len(stops)))
        return torch.cat((numbers, stops, self.places.flatten())).view(torch.uint8)

    def scales(self, weight: Weight) -> Tensor:
        """Of each space between edges of rows, in each run."""
        rows, columns = self.rows[:-1], self.columns[:-1]
        made = torch.zeros(len(rows), len(columns), dtype=SCALE_TYPES[self.types[1]])
        for part in weight.parts:
            to_rows, from_rows = _blocks_at(part, 0, rows)
            to_columns, from_columns = _blocks_at(part, 1, columns)
            made[to_rows, to_columns] = _scales(part.stored)[from_rows][:, from_columns].to(
                made.dtype
            )
        return made


def _by_column(scale_rows: Tensor, lanes: Tensor) -> Tensor:
    """Of each panel, whether one of its halves has rows of several spaces between edges."""
    spaces = torch.where(lanes == NO_ROW, NO_ROW, scale_rows[lanes]).view(-1, 2, panel() // 2)
    return ((spaces != spaces[:, :, :1]) & (spaces != NO_ROW)).any(2).any(1)


def _edges(parts: Sequence[StoredPart], axis: int) -> Tensor:
    """Where a part or one of its blocks begins or ends."""
    found: set[int] = set()
    for part in parts:
        block, first = _blocks(part.stored, axis)
        begin, stop = part.begin[axis], part.begin[axis] + part.size[axis]
        found.update((begin, stop, *range(begin + block - first, stop, block)))
    return torch.tensor(sorted(found))


def _blocks_at(part: StoredPart, axis: int, starts: Tensor) -> tuple[slice, Tensor]:
    """Which spaces between edges a part fills, and the block of each."""
    block, first = _blocks(part.stored, axis)
    begin, stop = part.begin[axis], part.begin[axis] + part.size[axis]
    low, high = (int((starts < edge).sum()) for edge in (begin, stop))
    return slice(low, high), (starts[low:high] - begin + first) // block


def _blocks(stored: Stored, axis: int) -> tuple[int, int]:
    """Numbers with one scale along an axis, and where the first stands among them."""
    if isinstance(stored, Fp8Stored):
        return stored.block[axis], stored.first[axis]
    assert isinstance(stored, Int4Stored | Fp4Stored)
    return (stored.group, stored.first) if axis else (1, 0)


def _scale_dtype(weight: Weight) -> torch.dtype:
    dtypes = {_scales(part.stored).dtype for part in weight.parts}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _scales(stored: Stored) -> Tensor:
    if isinstance(stored, Fp8Stored):
        return stored.scales.float() * FP8_UNIT
    assert isinstance(stored, Int4Stored | Fp4Stored)
    return stored.scales


def _codes(weight: Weight) -> Tensor:
    """A byte each."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for part in weight.parts:
        codes[part.where] = _bytes(part.stored)
        if part.read:
            part.read()
    return codes


def _bytes(stored: Stored) -> Tensor:
    if isinstance(stored, Fp8Stored):
        return stored.numbers.view(torch.uint8)
    assert isinstance(stored, Int4Stored | Fp4Stored)
    pairs = stored.packed.view(torch.uint8)  # of int4 words too: their first byte is the lowest
    nibbles = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    return nibbles[:, stored.first : stored.first + stored.columns]
