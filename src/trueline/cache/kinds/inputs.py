"""What the layers of a kind get of a step.

A kind has two ways to read the rows of a step, into one class: from the host's rows (an eager
step), or from fixed buffers on the device, whose numbers the host does not know (a captured one).
Everything after that, up to what the layers get, is the same code for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from trueline.cache.rows import BatchRow
from trueline.device import send
from trueline.ops.mla_decode import Tiling

if TYPE_CHECKING:
    from trueline.cache.kinds import StateKind

View = TypeVar("View")
Other = TypeVar("Other")
Rows = TypeVar("Rows")
Input = TypeVar("Input")


class Column(NamedTuple):
    """A number for every token of a captured step, in a fixed buffer."""

    dtype: torch.dtype
    padding: int = 0
    """What a padded row has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputContext(Generic[View]):
    view: View
    """Of the first layer that keeps the kind: all have the same layout."""
    group: int
    """Index of its block table among those of a row."""
    others: Mapping[str, tuple[object, int]]
    """By kind: the view of its first layer, and the index of its block table."""
    implementations: Mapping[str, str]
    """Op -> the name of the chosen implementation."""
    device: torch.device
    tiling: Tiling
    batch_invariant: bool

    def other(self, kind: type[StateKind[Other, Any]]) -> tuple[Other, int]:
        """Of a kind that the same layers keep: its view, and the index of its block table."""
        return cast("tuple[Other, int]", self.others[kind.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRows:
    """The rows of a captured step: decode rows, each with the same number of tokens."""

    lengths: Tensor  # [rows * tokens_per_row] int32: positions that each token sees
    columns: Mapping[str, Tensor]
    """The kind's columns, [rows * tokens_per_row] each."""
    tables: Sequence[Tensor]
    """[rows, blocks] int32, by group."""
    tokens_per_row: int
    longest: int
    """Positions that a token may see."""


class KindInputs(ABC, Generic[Rows, Input]):
    columns: ClassVar[Mapping[str, Column]] = {}
    limits: tuple[int, ...] = ()
    """Steps in which no token sees more positions than such a number are captured apart."""

    @abstractmethod
    def read(self, rows: Sequence[BatchRow]) -> Rows:
        """From the host's rows, for an eager step."""

    @abstractmethod
    def read_fixed(self, fixed: FixedRows) -> Rows:
        """The same from the fixed buffers of a captured step."""

    def values(self, rows: Sequence[BatchRow]) -> Mapping[str, Sequence[int]]:
        """What the columns hold in a captured step of these rows, token by token."""
        return {}

    @abstractmethod
    def build(self, rows: Rows, cells: Sequence[Tensor]) -> Input:
        """`rows`: as read. `cells` [tokens], by group: where each token's cache row goes."""


def blocks_of(fixed: FixedRows, group: int, block_size: int) -> Tensor:
    """[rows, blocks]: as many of a group's blocks as hold the positions that a token may see."""
    return fixed.tables[group][:, : -(-fixed.longest // block_size)]


def places(tokens: Sequence[int], device: torch.device) -> slice | Tensor:
    """Indices into the step's tokens; a slice where they follow each other."""
    if not tokens:
        return slice(0, 0)
    first, stop = tokens[0], tokens[-1] + 1
    if stop - first == len(tokens):
        return slice(first, stop)
    return send(torch.tensor(tokens, dtype=torch.long), device)
