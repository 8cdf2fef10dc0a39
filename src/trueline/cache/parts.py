"""What a cache keeps, as integers that can be summed: canaries (engine/canaries) see by these sums
that somebody has written where nobody may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# From the widest: the wider the words, the fewer there are to add.
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Part:
    """What each place (a block, or a slot) has of one thing: rows of latents, keys, their scales,
    heads of a state. Strided as it lies in memory, so that layouts need no code of their own."""

    name: str
    words: Tensor  # [layers, places, groups, rows of a group, ...] integers
    start: int
    """Byte of a layer's memory where the first row begins."""
    constant: bool = False
    """It has one place, which nobody may ever write."""

    @staticmethod
    def of(name: str, values: Tensor, memory: Tensor, *, constant: bool = False) -> Part:
        """`values` [layers, places, groups, rows of a group, …] within `memory` [layers, …]."""
        start = values.data_ptr() - memory.data_ptr()
        return Part(name, _as_words(values), start, constant)

    @staticmethod
    def rows(name: str, values: Tensor, memory: Tensor, *, constant: bool = False) -> Part:
        """`values` [layers, places, rows, …]."""
        return Part.of(name, values.unsqueeze(3), memory, constant=constant)

    @property
    def num_places(self) -> int:
        return self.words.shape[1]

    @property
    def num_rows(self) -> int:
        return self.words.shape[2] * self.words.shape[3]

    @property
    def row_bytes(self) -> int:
        return self.words[0, 0, 0, 0].numel() * self.words.itemsize

    def byte(self, place: int, row: int) -> int:
        """Of a layer's memory, where a row begins."""
        _, each, group, token = self.words.stride()[:4]
        within = self.words.shape[3]
        words = place * each + row // within * group + row % within * token
        return self.start + words * self.words.itemsize

    def sums(self, places: Tensor) -> Tensor:
        """[layers, places, rows] int64: each row's words added up, modulo 2^64. A row in which one
        word has changed has another sum."""
        chosen = self.words[:, places]
        return chosen.sum(tuple(range(4, chosen.dim())), dtype=torch.int64).flatten(2)


@runtime_checkable
class Guarded(Protocol):
    """A store that canaries can guard."""

    def parts(self) -> Sequence[Part]: ...


def _as_words(values: Tensor) -> Tensor:
    """The same memory as the widest integers that fit into its rows."""
    steps = [values.storage_offset(), *values.stride()[:-1], values.shape[-1]]
    for dtype in WORDS:
        if not any(step * values.itemsize % dtype.itemsize for step in steps):
            return values.view(dtype)
    raise AssertionError("every row has whole bytes")
