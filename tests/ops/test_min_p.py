"""min-p looks at the distribution that is drawn from: after the temperature, not before."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from trueline.device import interpreting
from trueline.ops.sampling import cpu, reference, triton
from trueline.verify.ops.sampling import draw, row

IMPLEMENTATIONS = [cpu, reference, *([triton] if interpreting() else [])]


@pytest.mark.parametrize("op", IMPLEMENTATIONS, ids=lambda op: op.__name__.rpartition(".")[2])
@pytest.mark.parametrize(
    ("temperature", "min_p", "stays"),
    [
        (2.0, 0.5, True),  # exp(-1) is less than half of the best, exp(-1/2) is not
        (2.0, 0.65, False),
        (0.5, 0.3, False),  # exp(-1) is enough, exp(-2) is not
        (0.5, 0.1, True),
        (1.0, 0.36, True),
        (1.0, 0.37, False),
    ],
)
def test_the_second_best(op: ModuleType, temperature: float, min_p: float, stays: bool) -> None:
    rows = [row(temperature=temperature, min_p=min_p, seed=seed) for seed in range(60)]
    logits = torch.tensor([[0.0, -1.0, -50.0]]).expand(60, 3)
    tokens = draw(op, logits, rows).tokens.tolist()
    assert (1 in tokens) is stays
