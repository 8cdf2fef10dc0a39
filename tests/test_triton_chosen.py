"""Prefill in Triton over what tokens chose, through the interpreter (or on the GPU where there is
one): every way to cut the work, and which runs of a step take it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.verify.ops import chosen

FLOATS = (torch.float32, torch.float16)
PLANS = {
    "one word": {"queries": 32, "keys": 32},
    "half a word": {"queries": 16, "keys": 16, "workspace": 64},
    "two words": {"queries": 32, "keys": 64, "workspace": 192},
    "four words": {"queries": 128, "keys": 128, "workspace": 192},
}
EACH = [*zip(PLANS, FLOATS * 2, strict=True)]
OTHERS = [
    pytest.param(plan, dtype, marks=pytest.mark.slow)
    for plan in PLANS
    for dtype in FLOATS
    if (plan, dtype) not in EACH
]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.mark.parametrize(("plan", "dtype"), [*EACH, *OTHERS])
def test_chosen(monkeypatch: pytest.MonkeyPatch, plan: str, dtype: torch.dtype) -> None:
    def launch(*given: Any) -> prefill_cut.LaunchPlan:
        return replace(prefill_cut.launch(*given), **PLANS[plan])

    monkeypatch.setattr(prefill, "launch", launch)
    monkeypatch.setattr(prefill, "CHUNK", 16)
    monkeypatch.setattr(prefill, "LATEST_CHOSEN", prefill.Latest())
    chosen.chosen(prefill, dtype)
