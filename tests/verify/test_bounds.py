"""What float32 may lose, against sums in the worst order. Only elementwise arithmetic, which has
the same bits on every machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trueline.verify import bounds
from trueline.verify.failed import CheckFailed
from trueline.verify.ops import randn


def one_by_one(terms: Tensor) -> Tensor:
    """Of terms [n, rows]."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def margin(ours: Tensor, exact: Tensor, accepted: Tensor) -> float:
    return float(((ours.double() - exact).abs() / accepted).max())


@pytest.mark.parametrize("terms", [1, 13, 47, 384, 3000])
def test_sums_in_the_worst_order_are_inside_and_digits_lost_are_not(terms: int) -> None:
    x, weight = randn(terms, 2000), randn(terms, 2000, seed=1)
    exact, size = (x.double() * weight).sum(0), (x.double() * weight).norm(dim=0)
    accepted = bounds.dot_bound(terms, size)
    inside = margin(one_by_one(x * weight), exact, accepted)
    assert 0.1 < inside < 0.9
    half = one_by_one(x.half().float() * weight)
    assert margin(half, exact, accepted) > 20


@pytest.mark.parametrize("terms", [2, 37, 5000])
def test_sums_of_one_sign(terms: int) -> None:
    x = randn(terms, 1000).square()
    exact = x.double().sum(0)
    assert 0.1 < margin(one_by_one(x), exact, bounds.sum_bound(terms) * exact) < 0.9


def test_products_of_many_factors() -> None:
    factors = 1 + 1e-3 * randn(1000, 500)
    ours, exact = torch.ones(500), factors.double().prod(0)
    for factor in factors:
        ours = ours * factor
    assert 0.2 < margin(ours, exact, bounds.chain_bound(1000) * exact) < 0.9


def test_sums_of_narrow_products_may_be_cut() -> None:
    """As tensor cores do: 16 products at a time, towards zero."""
    x, weight = randn(384, 2000).half().float(), randn(384, 2000, seed=1).half().float()
    exact, size = (x.double() * weight).sum(0), (x.double() * weight).norm(dim=0)
    total = torch.zeros(2000)
    for group in (x.double() * weight).split(16):
        wide = total.double() + group.sum(0)
        near = wide.float()
        away = near.double().abs() > wide.abs()
        total = torch.where(away, torch.nextafter(near, torch.zeros(2000)), near)
    assert margin(total, exact, bounds.dot_bound(384, size, torch.float16)) < 0.9
    half = total.half().float()
    assert margin(half, exact, bounds.dot_bound(384, size, torch.float16)) > 20


def attended(round_scores: Callable[[Tensor], Tensor]) -> float:
    """With a needle, whose score is large and may weigh anything."""
    q, keys = randn(50, 47, seed=2), randn(200, 47, seed=3)
    keys[77] *= 12
    wanted = 0.21 * q.double() @ keys.double().T
    off = 0.21 * bounds.gemm(q, keys, torch.float32)
    accepted, _ = bounds.softmax(wanted, off, keys[:, :37].double())
    scores = 0.21 * one_by_one((q[:, None] * keys).permute(2, 0, 1))
    ours = round_scores(scores).double().softmax(-1) @ keys[:, :37].double()
    error = (ours - wanted.softmax(-1) @ keys[:, :37].double()).norm(dim=-1)
    return float((error / accepted).max())


def test_attention_with_a_needle() -> None:
    assert 0.02 < attended(lambda scores: scores) < 0.9
    assert attended(lambda scores: scores.half().float()) > 5


@pytest.mark.parametrize(
    "ours", [torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, 2.1]]), torch.ones(2, 1)]
)
def test_what_is_not_within_is_seen(ours: Tensor) -> None:
    exact = torch.tensor([[1.0, 2.0]])
    bounds.require_within("rows", exact + 0.01, exact, torch.tensor([[0.03]]))
    with pytest.raises(CheckFailed, match="rows: "):
        bounds.require_within("rows", ours, exact, torch.tensor([[0.03]]))
