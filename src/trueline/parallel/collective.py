"""What layers may ask of the other ranks. They never see how many there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trueline.parallel.placement import (
    Divided,
    Partial,
    Placement,
    Replicated,
    after_gemm,
    check_shape,
)
from trueline.spec.source import Span


class Collective(Protocol):
    @property
    def size(self) -> int:
        """Ranks."""

    def all_reduce(self, x: Partial) -> Replicated:
        """The sum of every rank's x, which may be overwritten."""

    def all_gather(self, x: Divided, dim: int) -> Replicated:
        """Every rank's x, one after the other along dim."""

    def from_first(self, x: Tensor) -> Replicated:
        """Rank 0's x; another's may be overwritten."""


class Solo:
    """One rank: everything is already here."""

    size = 1

    def all_reduce(self, x: Partial) -> Replicated:
        return Replicated(x)

    def all_gather(self, x: Divided, dim: int) -> Replicated:
        return Replicated(x)

    def from_first(self, x: Tensor) -> Replicated:
        return Replicated(x)


class Absent:
    """In place of other ranks where nothing is computed: results of the right shapes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Partial) -> Replicated:
        return Replicated(x)

    def all_gather(self, x: Divided, dim: int) -> Replicated:
        return Replicated(torch.cat([x] * self.size, dim))

    def from_first(self, x: Tensor) -> Replicated:
        return Replicated(x)


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A linear layer whose sums run over what is divided among the ranks. As `spec/shard.py`
    divides its weight, a rank has a part of every sum (a row-parallel linear), or all of some:
    `invariant_sums`, whose bits do not depend on the number of ranks. What is replicated is summed
    on every rank alike: nothing is exchanged, or it would count once for each of them."""

    collective: Collective
    invariant_sums: bool
    outputs: Span
    """The hidden channels of which a rank has the sums where they are invariant."""

    def check(self, name: str, weight: tuple[int, ...], over: Span, each: int = 1) -> Placement:
        """That a weight was cut for `run`: over so many channels of `over` `each`. Returns where
        the GEMM's output is, given this rank's part of what is summed over."""
        gathered = self.invariant_sums and not over.is_whole
        inputs = Span.whole(over.total) if gathered else over
        outputs = self.outputs if gathered else Span.whole(self.outputs.total)
        check_shape(name, weight, outputs.count, inputs.count * each)
        x = Placement.REPLICATED if inputs.is_whole else Placement.DIVIDED
        return after_gemm(name, x, outputs=outputs, inputs=inputs)

    def run(self, x: Tensor, gemm: Callable[[Tensor], Tensor], over: Span) -> Replicated:
        """gemm(x) of every rank's x [..., part] together; `over`: what x has of what is summed
        over."""
        if over.is_whole:
            return Replicated(gemm(x))
        if self.invariant_sums:
            out = gemm(self.collective.all_gather(Divided(x), x.dim() - 1))
            return self.collective.all_gather(Divided(out), out.dim() - 1)
        return self.collective.all_reduce(Partial(gemm(x)))


class Threads:
    """Ranks as threads of one process, for tests: all meet, then all leave."""

    def __init__(self, size: int) -> None:
        self.size = size
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
        self._group, self._rank, self.size = group, rank, group.size

    def all_reduce(self, x: Partial) -> Replicated:
        return Replicated(torch.stack(self._group.meet(self._rank, x)).sum(0))

    def all_gather(self, x: Divided, dim: int) -> Replicated:
        return Replicated(torch.cat(self._group.meet(self._rank, x), dim))

    def from_first(self, x: Tensor) -> Replicated:
        return Replicated(self._group.meet(self._rank, x)[0])

    def share(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return [x.numpy().tobytes().decode() for x in self._group.meet(self._rank, mine)]
