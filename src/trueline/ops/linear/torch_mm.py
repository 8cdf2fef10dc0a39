"""Plain torch, with the weight as the left operand: faster than x Wᵀ at every row count seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.ops.linear import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["torch_mm"]

# In whole tiles, so that the bits of a row depend neither on the number of rows nor on that of
# columns: libraries compute what is left over at an edge in another way, narrower on older CPUs.
TILE = 16
# Beyond it, MKL on Intel divides long sums in another way (seen from 192 rows of 1,024 values on).
MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Packed:
    weight: Tensor
    columns: int


def pack(weight: Weight | Tensor) -> Packed:
    weight = dense(weight)
    return Packed(_whole_tiles(weight).contiguous(), len(weight))


def run(x: Tensor, packed: Packed) -> Tensor:
    blocks = [torch.mm(packed.weight, _whole_tiles(rows).t()) for rows in torch.split(x, MOST_ROWS)]
    whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    return whole.t()[: len(x), : packed.columns]


def run_wide(x: Tensor, packed: Packed) -> Tensor:
    return run(x, packed).float()


def _whole_tiles(rows: Tensor) -> Tensor:
    left = -len(rows) % TILE
    return pad(rows, (0, 0, 0, left)) if left else rows
