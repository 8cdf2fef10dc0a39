"""Quantised weights as kernels for GPUs read them: row after row of codes, and a scale for so many
rows and columns. No number is changed on the way, wherever a rank's cut or a neighbour begins: the
blocks of scales get smaller where they do not line up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.fp4 import Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored
from trueline.weights.value import StoredPart, Weight

Form = Literal["fp8", "int4", "fp4"]
Quantised = Fp8Stored | Int4Stored | Fp4Stored
FORMS: dict[type, Form] = {Fp8Stored: "fp8", Int4Stored: "int4", Fp4Stored: "fp4"}


@dataclass(frozen=True, slots=True)
class Codes:
    """Matrices of one shape."""

    form: Form
    numbers: Tensor
    """uint8 [matrices, rows, bytes]: a byte a number, or two, the even column's in its low bits."""
    scales: Tensor
    """[matrices, rows / rows_per_scale, columns / group], rounded up; of fp4 uint8 exponents."""
    rows_per_scale: int
    group: int
    columns: int
    powers_of_two: bool
    """Of fp8: whether scales are, those of fp8 activations included."""

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


def codes_of(weight: Weight) -> Codes:
    """Of a matrix, or of a stack of them, on the device where it is wanted."""
    matrices = list(weight.unstack()) if len(weight.shape) == 3 else [weight]
    parts = [list(_parts(matrix)) for matrix in matrices]
    form, group, rows_per_scale = common_blocks(weight)
    (powers_of_two,) = {
        isinstance(stored, Fp8Stored) and stored.powers_of_two
        for mine in parts
        for _, stored in mine
    }
    columns = weight.shape[-1]
    numbers = torch.empty(
        *(len(matrices), weight.shape[-2], columns if form == "fp8" else -(-columns // 2)),
        dtype=torch.uint8,
        device=weight.device,
    )
    scales: list[Tensor] = []
    for matrix, mine in enumerate(parts):
        found = []
        for part, stored in mine:
            at = part.where[-2]
            numbers[matrix, at] = _bytes(stored).to(weight.device)
            found.append(_finer(stored, rows_per_scale, group).to(weight.device))
            if part.read:
                part.read()
        scales.append(torch.cat(found))
    return Codes(form, numbers, torch.stack(scales), rows_per_scale, group, columns, powers_of_two)


def _parts(matrix: Weight) -> Iterator[tuple[StoredPart, Quantised]]:
    """From the first row to the last."""
    for part in sorted(matrix.parts, key=lambda part: part.begin):
        stored = part.stored
        assert isinstance(stored, Quantised), f"{part.format}: kernels for codes take no others"
        assert stored.shape[1] == matrix.shape[-1], "a part has all columns"
        yield part, stored


def common_blocks(weight: Weight) -> tuple[Form, int, int]:
    """The form of its parts, and columns and rows of the largest blocks of scales that all of them
    can be cut into."""
    parts = list(_parts(weight))
    (form,) = {FORMS[type(stored)] for _, stored in parts}
    group = rows = 0
    for part, stored in parts:
        if isinstance(stored, Fp8Stored):
            block, first = stored.block, stored.first
        else:
            block, first = (1, stored.group), (0, stored.first)
        group = gcd(group, block[1], first[1])
        rows = gcd(rows, block[0], first[0], part.begin[-2])
    return form, group, rows


def _bytes(stored: Quantised) -> Tensor:
    if isinstance(stored, Fp8Stored):
        return stored.numbers.view(torch.uint8)
    packed = stored.packed.contiguous().view(torch.uint8)
    first, columns = stored.first, stored.columns
    if first % 2 == 0:
        return packed[:, first // 2 : (first + columns + 1) // 2]
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    mine = torch.nn.functional.pad(nibbles[:, first : first + columns], (0, columns % 2))
    return mine[:, 0::2] | mine[:, 1::2] << 4


def _finer(stored: Quantised, rows_per_scale: int, group: int) -> Tensor:
    """Scales of its own blocks, for smaller ones."""
    if isinstance(stored, Fp8Stored):
        block, first = stored.block, stored.first
    else:
        block, first = (1, stored.group), (0, stored.first)
    height, width = stored.shape
    rows = (torch.arange(0, height, rows_per_scale) + first[0]) // block[0]
    columns = (torch.arange(0, width, group) + first[1]) // block[1]
    return stored.scales[rows.to(stored.scales.device)][:, columns.to(stored.scales.device)]
