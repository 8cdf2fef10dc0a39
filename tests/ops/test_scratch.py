"""Kernels keep scratch memory: what one call leaves there shows in none after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trueline import native
from trueline.ops.registry import implementation
from trueline.verify.ops import randn

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="no native kernels here")
LINEAR: Any = implementation("linear", "native")
EXPERTS: Any = implementation("experts", "native")
TOKENS, TOP, HIDDEN, WIDTH, HELD = 9, 3, 20, 12, 4


@pytest.mark.parametrize("first", [0, HELD, 2 * HELD])
def test_experts_of_other_ranks_are_not_read(first: int) -> None:
    """A rank holds `HELD` of three times as many; the parts of others were never written."""
    packed = EXPERTS.pack(
        randn(HELD, 2 * WIDTH, HIDDEN), randn(HELD, HIDDEN, WIDTH, seed=1), LINEAR
    )
    ids = torch.rand(TOKENS, 3 * HELD, generator=torch.Generator().manual_seed(0)).argsort(1)[
        :, :TOP
    ]
    x, weights = randn(TOKENS, HIDDEN, seed=2), randn(TOKENS, TOP, seed=3).abs()
    held = (ids >= first) & (ids < first + HELD)
    assert held.any()
    assert not held.all()
    everywhere = torch.arange(TOKENS * TOP).view(TOKENS, TOP) % HELD + first
    nothing = torch.full_like(x, float("nan"))
    EXPERTS.run(nothing, everywhere, weights, packed, LINEAR, first=first)  # NaN in all scratch
    found = EXPERTS.run(x, ids, weights, packed, LINEAR, first=first)
    # the same with weight 0 for others, and an expert of ours in their place
    ours = EXPERTS.run(
        x, torch.where(held, ids, first), weights * held, packed, LINEAR, first=first
    )
    assert found.isfinite().all()
    assert torch.allclose(found, ours, atol=1e-5)
