"""What the engine process counts, of a core that is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueline.cache.blocks import BlockPool
from trueline.cache.groups import BlockGroups
from trueline.config import EngineConfig
from trueline.engine.canaries.report import CanaryHit, CanaryReport, Hit
from trueline.engine.grammars import Grammars
from trueline.engine.scheduler_config import Counters
from trueline.errors import EngineBroken
from trueline.server.process.client import EngineClient
from trueline.server.process.engine_process import _failed
from trueline.server.process.messages import STEP_TOKEN_BUCKETS, encode
from trueline.server.process.stats import StatsRecorder

HIT = Hit(
    kind="latent", noun="block", place=0, change=None, why="nobody may", clean_step=0, writer=None,
    holders=[], neighbours={}, implementations={},
)  # fmt: skip


def core_with(*pools: BlockPool) -> Any:
    return SimpleNamespace(
        scheduler=SimpleNamespace(num_running=1, num_waiting=2, counters=Counters()),
        slots=None,
        blocks=BlockGroups(pools),
        late_kernels=SimpleNamespace(count=0),
        executor=SimpleNamespace(num_canary_checks=3),
        grammars=Grammars(),
    )


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_are_those_of_the_group_that_runs_out_first(turned: bool) -> None:
    """By its share, not by the number of blocks; queries are counted by the first group."""
    large, small = BlockPool(101, 4, True), BlockPool(11, 12, True)
    large.allocate(20)
    small.allocate(9)
    pools = (small, large) if turned else (large, small)
    pools[0].count_query(48, 12)
    stats = StatsRecorder(core_with(*pools)).snapshot()
    assert (stats.num_blocks, stats.num_blocks_used) == (10, 9)
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (48, 12)


def test_steps_are_counted_by_their_tokens() -> None:
    """Of the step that was dispatched: with overlap, a call may collect the last one and dispatch
    none."""
    core = core_with(BlockPool(9, 4, True))
    recorder, counters = StatsRecorder(core), core.scheduler.counters
    for tokens in (1, 2, 8, 9, 16_384, 16_385, None):
        if tokens is not None:
            counters.num_steps += 1
            counters.num_scheduled_tokens += tokens
        recorder.stepped(0.1, [])
    counts = dict(zip([*STEP_TOKEN_BUCKETS, "more"], recorder.snapshot().step_token_counts,
                      strict=True))  # fmt: skip
    filled = {bound: count for bound, count in counts.items() if count}
    assert filled == {1: 1, 8: 2, 16: 1, 16_384: 1, "more": 1}


def test_canaries_are_counted() -> None:
    """A check by the engine; a hit by its client, for the engine is gone. It may come from another
    rank, as words."""
    assert StatsRecorder(core_with(BlockPool(9, 4, True))).snapshot().num_canary_checks == 3
    report = CanaryReport(rank=0, step=1, interval=1, num_hits=1, steps=[], tables={}, hits=[HIT])
    words = f"rank 1: {CanaryHit(report)}"
    for error in (CanaryHit(report), EngineBroken(words)):
        assert _failed(error).canary_hit
    assert not _failed(EngineBroken("a rank is gone")).canary_hit
    assert not _failed(ValueError("no")).canary_hit

    async def hits() -> int:
        client = EngineClient(Path("nowhere"), EngineConfig())
        for error in (CanaryHit(report), EngineBroken("a rank is gone")):
            client._received(encode(_failed(error)))
        return client.num_canary_hits

    assert asyncio.run(hits()) == 1
