"""int4 and fp4 weights in the order in which the tensor cores' threads want them.

A matrix is tiles of 64 rows; a tile is chunks of 64 columns, and of each chunk what a thread needs,
16 bytes: its two rows of two blocks of 32 columns, eight neighbours of each. Within a word two
codes that are 16 bits apart are a pair of the MMA's operand; int4 codes are nibbles, the bits of
fp4 ones stand where few shifts bring them into bfloat16 (`_spread`). Rows of gate and up alternate
by eight, so that a thread has both. Scales stand row by row for up to 256 columns.

Nothing but padding is added: up to whole tiles of rows and chunks of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.ops.codes import Codes, codes_of, common_blocks
from trueline.weights.value import Weight

TILE_ROWS = 64
CHUNK = 64
"""Columns; a step of the kernels is up to four chunks."""
STEP = 256
BLOCK = 32
"""Columns that an MMA's neighbours come from: a scale is for one or several such blocks."""
GROUPS = (128, 64, 32)
ZERO_CODES = {"int4": 8, "fp4": 0}
LARGEST_SCALE = 128
"""Of fp4: 2, times the 2^126 that the kernels add, is the largest power that bfloat16 has."""
THREADS = 128


@dataclass(frozen=True, slots=True)
class Fragments:
    """Matrices of one shape."""

    form: Literal["int4", "fp4"]
    words: Tensor
    """int32 [matrices, tiles, chunks, 128 threads, 4]."""
    scales: Tensor
    """[matrices, tiles, 64 × groups]: steps of [64, STEP / group], then what is left of the columns
    as [64, its groups]. Of fp4 uint8 exponents."""
    group: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    @property
    def tail(self) -> int:
        """Chunks after the last whole step."""
        return self.words.shape[2] - self.columns // STEP * (STEP // CHUNK)


def fragments_of(weight: Weight, *, gated: bool) -> Fragments | None:
    """Of a stack of matrices, on the device where they are wanted, one after the other. None where
    a scale is not for whole blocks, as after a cut inside of a group, has digits that bfloat16 has
    not, or is larger than the kernels can take. `gated`: rows are those of the gate, then as many
    of the up projection."""
    form, smallest, _ = common_blocks(weight)
    if form == "fp8" or smallest % BLOCK:
        return None
    group = next(group for group in GROUPS if smallest % group == 0)
    count, rows, columns = weight.shape
    order = _rows(rows, gated)
    tiles, chunks = len(order) // TILE_ROWS, -(-columns // CHUNK)
    shape = (count, tiles, chunks, THREADS, 4)
    words = torch.empty(shape, dtype=torch.int32, device=weight.device)
    scales: Tensor | None = None
    order = order.to(weight.device)
    for index, matrix in enumerate(weight.unstack()):
        codes = codes_of(matrix)
        made = _words(codes, order, ZERO_CODES[form])
        words[index] = _spread(made) if form == "fp4" else made
        mine = _scales(codes, order, group, chunks)
        if mine.dtype not in (torch.bfloat16, torch.uint8):
            return None
        if scales is None:
            scales = mine.new_empty(count, *mine.shape)
        scales[index] = mine
    assert scales is not None, "there is an expert"
    if form == "fp4" and int(scales.max()) > LARGEST_SCALE:
        return None
    return Fragments(form, words, scales, group, columns)


def _rows(rows: int, gated: bool) -> Tensor:
    """Which row of the matrix stands where; `rows` for none."""
    if not gated:
        return pad(torch.arange(rows), (0, -rows % TILE_ROWS), value=rows)
    width = rows // 2
    gate = pad(torch.arange(width), (0, -width % (TILE_ROWS // 2)), value=rows)
    up = torch.where(gate == rows, rows, gate + width)
    return torch.stack((gate.view(-1, 8), up.view(-1, 8)), 1).flatten()


def _words(codes: Codes, order: Tensor, zero: int) -> Tensor:
    """[tiles, chunks, 128, 4]."""
    columns, both = codes.columns, zero | zero << 4
    packed = codes.numbers[0]
    if columns % 2:
        packed = packed.clone()
        packed[:, -1] = packed[:, -1] & 15 | zero << 4
    packed = pad(packed, (0, -packed.shape[1] % (CHUNK // 2), 0, 1), value=both)[order]
    nibbles = torch.stack((packed & 15, packed >> 4), -1)
    # tile, warp, row of 8 (gate's or up's), lane's row | chunk, block, lane's eight, MMA, its half
    each = nibbles.view(len(order) // TILE_ROWS, 4, 2, 8, -1, 2, 4, 2, 2, 2)
    both_halves = each[..., 0, :] | each[..., 1, :] << 4  # ..., MMA, which of a pair
    ordered = both_halves.permute(0, 4, 1, 3, 6, 5, 2, 8, 7)
    words = ordered.flatten(-2).contiguous().view(torch.int32)
    return words.view(*words.shape[:2], THREADS, 4)


def _spread(words: Tensor) -> Tensor:
    """Codes of each 16 bits as fp4's kernels take them: a sign at bit 15 and the other three bits
    from 6 on are bfloat16's, but for its bias. The first code stands 6 bits and the third 2 bits
    lower; the second 4 bits higher, its sign in the other half; of the fourth, only the last bit
    is elsewhere."""
    a, b, c, d = (words.view(torch.int16).int() >> 4 * i & 15 for i in range(4))
    first = (a & 8) << 6 | a & 7
    other = (b & 8).view(-1, 2).flip(1).view(b.shape)
    second = other | (b & 7) << 10
    third = (c & 8) << 10 | (c & 7) << 4
    fourth = (d & 8) << 12 | (d & 6) << 6 | (d & 1) << 14
    return (first | second | third | fourth).to(torch.int16).view(torch.int32)


def _scales(codes: Codes, order: Tensor, group: int, chunks: int) -> Tensor:
    """[tiles, 64 × groups]; zeros where nothing but padding has them."""
    block = torch.arange(0, codes.columns, group, device=order.device) // codes.group
    finer = codes.scales[0][:, block]
    groups = -(-chunks * CHUNK // group)
    filled = pad(finer, (0, groups - finer.shape[1], 0, 1))[order].view(-1, TILE_ROWS, groups)
    steps = torch.split(filled, STEP // group, dim=2)
    return torch.cat([step.flatten(1) for step in steps], dim=1)
