"""Collectives whose order is checked (`debug_collectives`): before each, every rank states what it
is about to do. Ranks that differ would wait for ever, or sum what does not belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from trueline.parallel.collective import Collective
from trueline.parallel.distributed import Journal, described_exchange
from trueline.parallel.group import RankFailed, RankGroup
from trueline.parallel.placement import Divided, Partial, Replicated


class Sharer(Protocol):
    def share(self, text: str) -> list[str]:
        """Every rank's text, by rank."""


class Stated:
    """A `Collective`; RankFailed on every rank where they state different things."""

    def __init__(self, collective: Collective, sharer: Sharer, journal: Journal) -> None:
        """`sharer`: used by nothing else."""
        self._collective, self._sharer, self._journal = collective, sharer, journal
        self.size = collective.size
        self._number = 0

    def all_reduce(self, x: Partial) -> Replicated:
        self._state(described_exchange("all_reduce", x))
        return self._collective.all_reduce(x)

    def all_gather(self, x: Divided, dim: int) -> Replicated:
        self._state(f"{described_exchange('all_gather', x)} along {dim}")
        return self._collective.all_gather(x, dim)

    def from_first(self, x: Tensor) -> Replicated:
        self._state(described_exchange("broadcast", x))
        return self._collective.from_first(x)

    def __reduce__(self) -> tuple[Callable[[Collective], Collective], tuple[Collective]]:
        """A copy without data, as its collective's: it exchanges nothing and so states nothing."""
        return _itself, (self._collective,)

    def _state(self, what: str) -> None:
        self._number += 1
        said = self._sharer.share(f"{what} (exchange {self._number}, step {self._journal.step})")
        if len(set(said)) == 1:
            return
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(said):
            ranks.setdefault(text, []).append(str(rank))
        stated = "; ".join(f"rank {', '.join(who)}: {text}" for text, who in ranks.items())
        raise RankFailed(f"the ranks' collectives differ: {stated}")


def _itself(collective: Collective) -> Collective:
    return collective


def stated(group: RankGroup) -> Stated:
    return Stated(group.collective, group.messages("stated"), group.journal)
