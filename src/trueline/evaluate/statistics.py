"""Intervals and tests for accuracies. No scipy: the few formulas that are needed, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959963984540054
"""Of a two-sided 95 % interval: Φ(Z) = 0.975."""
Interval = tuple[float, float]


def wilson(mean: float, count: float) -> Interval:
    """Wilson's score interval of a share `mean` of `count` independent answers."""
    if count <= 0:
        return 0.0, 1.0
    centre = mean + Z * Z / (2 * count)
    half = Z * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def accuracy_interval(item_means: Sequence[float], samples: int) -> Interval:
    """Of the mean over items, each the mean of `samples` answers. Answers to one item are not
    independent, so the count in Wilson's interval is the effective one: mean (1 − mean) over the
    variance of the mean between items. With one sample an item that is the number of items."""
    count = len(item_means)
    if not count:
        return 0.0, 1.0
    mean = math.fsum(item_means) / count
    squares = math.fsum((value - mean) ** 2 for value in item_means)
    bernoulli = mean * (1 - mean)
    if bernoulli <= 0:  # all right or all wrong: no variance to estimate it from
        effective = float(count)
    elif squares * samples <= bernoulli * count:  # at most: every answer independent
        effective = float(count * samples)
    else:
        effective = bernoulli * count * count / squares
    return wilson(mean, effective)


def difference_interval(differences: Sequence[float]) -> Interval:
    """Of the mean of paired differences in −1…1, by item. Agresti and Min's (2005): half a pair
    more in each of the four cells, then the normal approximation."""
    count = len(differences) + 2
    mean = math.fsum(differences) / count
    squares = math.fsum(value * value for value in differences) + 1
    half = Z * math.sqrt(max(squares / count - mean * mean, 0.0) / count)
    return max(-1.0, mean - half), min(1.0, mean + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p: how likely so uneven a split of the discordant pairs is where each side
    is equally likely. Whole numbers throughout: exact for any count."""
    count, fewer = only_a + only_b, min(only_a, only_b)
    total = term = 1
    for k in range(fewer):
        term = term * (count - k) // (k + 1)
        total += term
    share: float = total / (1 << count)
    return min(1.0, 2 * share)
