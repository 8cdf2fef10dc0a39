"""The rounding of numerics `published`, by its definition."""

from __future__ import annotations

from itertools import pairwise

import torch

from trueline.reference import published
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_rounding(_: Subject) -> None:
    """Half-way between two numbers of fp4, just below and just above, either sign: the nearest, and
    of two the one with an even code."""
    middles = [(a + b) / 2 for a, b in pairwise(CODES)]
    sizes = [x * (1 + by * 2.0**-20) for x in (*middles, *CODES[1:-1]) for by in (-1, 0, 1)]
    for scale in (2.0**-9, 1.0, 2.0**7):
        for x in sizes:
            wanted = min(CODES, key=lambda c: (abs(x - c), CODES.index(c) % 2)) * scale
            # the first keeps the group's scale
            given = torch.tensor([CODES[-1], x, -x], dtype=torch.float64) * scale
            found = published.through_e2m1(given)[1:].tolist()
            if found != [wanted, -wanted]:
                raise CheckFailed(f"fp4 rounding: {x * scale} to {found[0]}, expected {wanted}")
