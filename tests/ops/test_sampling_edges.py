"""Where a filter ends: ties, and masses that meet the limit exactly. Against a definition in
fractions, which nothing can round."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from types import ModuleType

import pytest
import torch

from trueline.device import interpreting
from trueline.ops.sampling import SamplingState, build_rows, cpu, reference, triton
from trueline.verify.ops.sampling import row

IMPLEMENTATIONS = [cpu, reference, *([triton] if interpreting() else [])]
VOCABULARY = 13
EQUAL = [1, 2, 4, 5, 7, 8, 10, 11]
"""Tokens of one logit, eight: each has an eighth of the mass, and no exponential is needed."""
LESS, NEVER = 6, 0
"""A token with no mass that float64 has (e^-1000 = 0), and one with none at all."""


def kept(top_k: int, top_p: float, min_p: float) -> list[int]:
    """In order of logits and ids: k of them, of which each has less than top_p before it."""
    likely = EQUAL if min_p > 0 else [*EQUAL, LESS, *sorted({*range(13)} - {*EQUAL, LESS, NEVER})]
    likely = likely[:top_k] if top_k else likely
    mass = [Fraction(token in EQUAL) for token in likely]
    share = Fraction(top_p)
    return [
        token for i, token in enumerate(likely) if top_p == 1 or sum(mass[:i]) < share * sum(mass)
    ]


def logits() -> torch.Tensor:
    x = torch.full((VOCABULARY,), -2000.0)
    x[EQUAL], x[LESS], x[NEVER] = 3.0, -997.0, -math.inf
    return x


def seed_for(token: int) -> int:
    """One whose noise is largest there: it is drawn wherever it may be."""
    return next(
        seed
        for seed in range(1000)
        if max(EQUAL, key=lambda other: reference.noise(seed, 3, other)) == token
    )


SEEDS = {token: seed_for(token) for token in EQUAL}
CASES = list(
    product([0, 1, 2, 4, 7, 8, 9], [1.0, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 7 / 8], [0.0, 1.0])
)


@pytest.mark.parametrize("op", IMPLEMENTATIONS, ids=lambda op: op.__name__.rpartition(".")[2])
def test_filters_end_where_they_say(op: ModuleType) -> None:
    states: list[SamplingState] = []
    wanted: list[int] = []
    cases = CASES[:: 5 if op is triton else 1]  # the interpreter is slow
    for i, (top_k, top_p, min_p) in enumerate(cases):
        left = kept(top_k, top_p, min_p)
        # the last that stays, the first that does not, and one more
        edge = len(left) if len(left) < len(EQUAL) else 0
        for token in {EQUAL[edge - 1], EQUAL[edge], EQUAL[i % 8]}:
            seed = SEEDS[token]
            states.append(row(seed=seed, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
            best = max(
                (other for other in left if other in EQUAL),
                key=lambda other: reference.noise(seed, 3, other),
            )
            wanted.append(best)
    found = op.sample(logits().expand(len(states), -1), build_rows(states))
    assert not found.bad.any()
    assert found.tokens.tolist() == wanted


@pytest.mark.parametrize("op", IMPLEMENTATIONS, ids=lambda op: op.__name__.rpartition(".")[2])
@pytest.mark.parametrize("width", [2, 8, 1024])
def test_a_nucleus_wider_than_what_is_looked_at_first(
    op: ModuleType, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "NUM_LEADING", width)
    states = [row(seed=SEEDS[t], temperature=1.0, top_p=p) for t in EQUAL for p in (0.5, 0.75)]
    found = op.sample(logits().expand(len(states), -1), build_rows(states))
    wanted = [
        max(EQUAL[: int(8 * p)], key=lambda other: reference.noise(SEEDS[t], 3, other))
        for t in EQUAL
        for p in (0.5, 0.75)
    ]
    assert found.tokens.tolist() == wanted


@pytest.mark.parametrize("op", IMPLEMENTATIONS, ids=lambda op: op.__name__.rpartition(".")[2])
def test_ranks_and_the_likeliest_among_ties(op: ModuleType) -> None:
    """Equal ones share the best rank and stand by id, inside and outside of the list."""
    x = logits().expand(VOCABULARY, -1)
    order = [*EQUAL, LESS, *sorted({*range(13)} - {*EQUAL, LESS, NEVER}), NEVER]
    for count in (0, 1, 5, 9, VOCABULARY):
        found = op.score(x, torch.arange(VOCABULARY), count)
        assert found.top_ids.tolist() == [order[:count]] * VOCABULARY
        for token, rank in enumerate(found.ranks.tolist()):
            assert rank == 1 + sum(value > x[0, token] for value in x[0])
        assert found.logprobs[EQUAL].tolist() == pytest.approx([-math.log(8)] * 8, rel=1e-6)
