"""What the engine process counts, of a core that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trueline.cache.blocks import BlockPool
from trueline.cache.groups import BlockGroups
from trueline.engine.scheduler_config import Counters
from trueline.server.process.stats import StatsRecorder


def core_with(*pools: BlockPool) -> Any:
    return SimpleNamespace(
        scheduler=SimpleNamespace(num_running=1, num_waiting=2, counters=Counters()),
        slots=None,
        blocks=BlockGroups(pools),
        late_kernels=SimpleNamespace(count=0),
        executor=SimpleNamespace(num_canary_checks=3),
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
