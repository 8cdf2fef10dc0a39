"""Ranks = one: every family and stored format on 1, 2, 4 and 8 ranks, routed experts by width and
whole; bitwise in batch-invariant mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rank_grid
from families import RUNNABLE
from spread import pairwise
from trueline.config import EngineConfig
from trueline.verify.engine import Ask
from trueline.verify.ranks import ranks_are_as_one
from trueline.verify.schedules import prompt

Tiny = Callable[..., Path]
BOTH = (False, True)
CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=40, block_size=8, overlap=False
)
# More keys than an indexer selects, a step with prefill and decode, one token.
ASKS = [Ask(prompt(30), 3), Ask(prompt(7), 3, arrives=1), Ask(prompt(1), 2, arrives=2)]


@pytest.mark.parametrize(
    ("family", "stored", "size", "expert_parallel", "batch_invariant"),
    # test_rank_ledger.py pairs families and formats
    pairwise(RUNNABLE, rank_grid.STORED, rank_grid.SIZES, BOTH, BOTH, unpaired=(0, 1)),
)
def test_ranks_are_as_one(
    family: str, stored: str, size: int, expert_parallel: bool, batch_invariant: bool, tiny: Tiny
) -> None:
    model = rank_grid.make(tiny, family, stored)
    config = replace(CONFIG, batch_invariant=batch_invariant)
    ranks_are_as_one(model, ASKS, config, size, expert_parallel=[expert_parallel])


@pytest.mark.parametrize(
    ("family", "heads", "batch_invariant"),
    pairwise(("deepseek_v2_lite", "deepseek_v32", "bailing_moe_v2_5"), (1, 3), BOTH),
)
def test_fewer_heads_than_ranks(family: str, heads: int, batch_invariant: bool, tiny: Tiny) -> None:
    """Every rank computes all of them, and nothing of attention is exchanged."""
    groups = {"group_norm_size": 4} if family == "bailing_moe_v2_5" else {}
    model = rank_grid.make(tiny, family, "plain", num_attention_heads=heads, **groups)
    config = replace(CONFIG, batch_invariant=batch_invariant)
    ranks_are_as_one(model, ASKS, config, 4)
