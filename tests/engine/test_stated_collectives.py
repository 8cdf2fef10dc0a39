"""Collectives whose order is checked: ranks that differ are named, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trueline.parallel.collective import Collective, Threads
from trueline.parallel.distributed import Journal
from trueline.parallel.group import RankFailed
from trueline.parallel.stated import Stated

Program = Callable[[Collective, Journal], None]
SIZE = 3
X = torch.ones(2, 4)


def right(ranks: Collective, journal: Journal) -> None:
    for _ in range(2):
        journal.step += 1
        ranks.all_gather(X, 1)
        ranks.all_reduce(X.clone())
    ranks.from_first(X)


def extra(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.all_gather(X, 1)
    ranks.all_gather(X, 1)


def too_few(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.all_gather(X, 1)
    journal.step += 1
    ranks.all_gather(X, 1)


def shaped(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.all_gather(X[:1], 1)


def typed(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.all_gather(X.half(), 1)


def other_op(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.from_first(X)


def other_dim(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.all_gather(X, 0)


def other_order(ranks: Collective, journal: Journal) -> None:
    journal.step += 1
    ranks.all_reduce(X.clone())
    ranks.all_gather(X, 1)


def other_step(ranks: Collective, journal: Journal) -> None:
    journal.step += 2
    right(ranks, journal)


def run(*programs: Program) -> list[str | None]:
    """Of every rank, the error it ends with."""
    threads, statements = Threads(SIZE), Threads(SIZE)

    def rank(number: int) -> str | None:
        journal = Journal()
        ranks = Stated(threads.rank(number), statements.rank(number), journal)
        try:
            programs[number](ranks, journal)
        except RankFailed as error:
            return str(error)
        return None

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(rank, range(SIZE)))


def test_ranks_that_do_the_same() -> None:
    assert run(right, right, right) == [None] * SIZE


@pytest.mark.parametrize(
    ("program", "stated"),
    [
        (extra, "all_gather of float32 [2, 4] along 1 (exchange 2, step 1)"),
        (too_few, "all_gather of float32 [2, 4] along 1 (exchange 2, step 2)"),
        (shaped, "all_gather of float32 [1, 4] along 1 (exchange 1, step 1)"),
        (typed, "all_gather of float16 [2, 4] along 1 (exchange 1, step 1)"),
        (other_op, "broadcast of float32 [2, 4] (exchange 1, step 1)"),
        (other_dim, "all_gather of float32 [2, 4] along 0 (exchange 1, step 1)"),
        (other_order, "all_reduce of float32 [2, 4] (exchange 1, step 1)"),
        (other_step, "all_gather of float32 [2, 4] along 1 (exchange 1, step 3)"),
    ],
)
def test_a_rank_that_does_something_else_is_named(program: Program, stated: str) -> None:
    errors = run(right, program, right)
    assert len(set(errors)) == 1, "the same on every rank"
    assert errors[0] is not None
    assert f"rank 1: {stated}" in errors[0]
    assert "rank 0, 2: all_" in errors[0]
