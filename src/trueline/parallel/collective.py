"""What layers may ask of the other ranks. They never see how many there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Collective(Protocol):
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, which may be overwritten."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's x, one after the other along dim."""

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's x."""


class Solo:
    """One rank: everything is already here."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def from_first(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A linear layer whose sums run over what is divided among the ranks. As `spec/shard.py`
    divides its weight, a rank has a part of every sum (a row-parallel linear), or all of some:
    `invariant_sums`, whose bits do not depend on the number of ranks."""

    collective: Collective
    invariant_sums: bool

    def run(self, x: Tensor, gemm: Callable[[Tensor], Tensor]) -> Tensor:
        """gemm(x) of every rank's x [n, part] together."""
        if self.invariant_sums:
            return self.collective.all_gather(gemm(self.collective.all_gather(x, 1)), 1)
        return self.collective.all_reduce(gemm(x))


class Threads:
    """Ranks as threads of one process, for tests: all meet, then all leave."""

    def __init__(self, size: int) -> None:
        self._parts: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def rank(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)

    def stop(self) -> None:
        """One rank cannot go on: the others must not wait for it."""
        self._barrier.abort()

    def meet(self, rank: int, x: Tensor) -> list[Tensor]:
        self._parts[rank] = x
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()
        return parts


class ThreadRank:
    def __init__(self, group: Threads, rank: int) -> None:
        self._group, self._rank = group, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._group.meet(self._rank, x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._group.meet(self._rank, x), dim)

    def from_first(self, x: Tensor) -> Tensor:
        return self._group.meet(self._rank, x)[0]

    def share(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return [x.numpy().tobytes().decode() for x in self._group.meet(self._rank, mine)]
