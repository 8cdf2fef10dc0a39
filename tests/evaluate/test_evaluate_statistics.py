"""Intervals and tests against other formulas for the same thing."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from trueline.evaluate.statistics import (
    Z,
    accuracy_interval,
    difference_interval,
    mcnemar,
    wilson,
)


def test_the_quantile() -> None:
    assert math.erf(Z / math.sqrt(2)) == pytest.approx(0.95, abs=1e-15)


def by_bisection(mean: float, count: int, low: float, high: float) -> float:
    """Where the score test of `mean` against p is just at the quantile."""

    def score(p: float) -> float:
        return abs(mean - p) - Z * math.sqrt(p * (1 - p) / count)

    inside = score(low) < 0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (score(middle) < 0) == inside else (low, middle)
    return low


@pytest.mark.parametrize(("right", "count"), [(1, 10), (5, 10), (93, 100), (999, 1000), (1, 2)])
def test_wilson_inverts_the_score_test(right: int, count: int) -> None:
    mean = right / count
    low, high = wilson(mean, count)
    assert low == pytest.approx(by_bisection(mean, count, 0.0, mean), abs=1e-12)
    assert high == pytest.approx(by_bisection(mean, count, mean, 1.0), abs=1e-12)


def test_wilson_at_the_ends() -> None:
    assert wilson(0.0, 10) == (0.0, pytest.approx(0.277532799, abs=1e-9))
    low, high = wilson(1.0, 10)
    assert (low, high) == (pytest.approx(1 - 0.277532799, abs=1e-9), pytest.approx(1.0))
    assert high <= 1.0
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_one_sample_an_item_is_wilson() -> None:
    means = [1.0] * 83 + [0.0] * 17
    assert accuracy_interval(means, 1) == pytest.approx(wilson(0.83, 100))


def test_samples_of_an_item_are_not_independent() -> None:
    """Items that are always right or always wrong say as much in eight samples as in one; samples
    that do not depend on the item count each."""
    sure = [1.0] * 20 + [0.0] * 10
    assert accuracy_interval(sure, 8) == pytest.approx(wilson(2 / 3, 30))
    assert accuracy_interval([0.5] * 30, 8) == pytest.approx(wilson(0.5, 240))
    assert accuracy_interval([1.0] * 30, 8) == pytest.approx(wilson(1.0, 30))
    mixed = [0.25, 0.75] * 15
    low, high = accuracy_interval(mixed, 8)
    assert wilson(0.5, 30)[0] < low < wilson(0.5, 240)[0]
    # p (1 − p) over the variance of the mean of 30 items whose deviations are a quarter
    assert (low, high) == pytest.approx(wilson(0.5, 0.25 / (0.25**2 / 30)))


def test_the_clustered_interval_covers() -> None:
    """Drawn anew 400 times from items of unequal difficulty, about 95 % have the truth inside."""
    draw = random.Random(3)
    inside = 0
    for _ in range(400):
        chances = [draw.betavariate(0.6, 0.4) for _ in range(60)]
        means = [sum(draw.random() < chance for _ in range(4)) / 4 for chance in chances]
        low, high = accuracy_interval(means, 4)
        inside += low <= 0.6 <= high
    assert 370 <= inside <= 396


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (0, 10), (5, 1), (1, 5), (7, 7), (12, 25)])
def test_mcnemar_is_the_sum_over_all_outcomes(only_a: int, only_b: int) -> None:
    count = only_a + only_b
    far = abs(only_a - only_b)
    ways = sum(math.comb(count, k) for k in range(count + 1) if abs(2 * k - count) >= far)
    assert mcnemar(only_a, only_b) == float(Fraction(ways, 2**count))


def test_mcnemar_at_known_values() -> None:
    assert mcnemar(5, 1) == 0.21875
    assert mcnemar(0, 10) == 0.001953125
    assert mcnemar(4, 5) == 1.0


def test_mcnemar_of_thousands() -> None:
    """By logarithms, and where nothing but exact numbers is left of the tail."""
    count, fewer = 9000, 4400
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            - count * math.log(2) for k in range(fewer + 1)]  # fmt: skip
    assert mcnemar(fewer, count - fewer) == pytest.approx(2 * math.fsum(map(math.exp, logs)), 1e-8)
    assert mcnemar(0, 1000) == 2.0**-999
    assert mcnemar(0, 5000) == 0.0


@pytest.mark.parametrize(("both", "only_a", "only_b", "neither"), [(80, 3, 9, 8), (0, 0, 0, 5)])
def test_the_paired_interval_is_agresti_and_min_s(
    both: int, only_a: int, only_b: int, neither: int
) -> None:
    differences = [0.0] * (both + neither) + [-1.0] * only_a + [1.0] * only_b
    count = both + only_a + only_b + neither + 2
    a, b = (only_a + 0.5) / count, (only_b + 0.5) / count
    half = Z * math.sqrt((a + b - (b - a) ** 2) / count)
    assert difference_interval(differences) == pytest.approx((b - a - half, b - a + half))
