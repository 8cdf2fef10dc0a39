"""The split-KV schedule: every tile once, whatever the shares round to; and the same list
whatever the chunks of rows that it is made over."""

from __future__ import annotations

import random

import pytest
import torch

from trueline.device import interpreting
from trueline.ops.mla_decode import split_schedule as schedule
from trueline.ops.mla_decode.launch_plan import LaunchPlan

pytestmark = pytest.mark.skipif(not interpreting(), reason="chunks as small as no GPU takes them")


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_several_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are looked at together, some in several splits, some without keys."""
    draw = random.Random(seed)
    plan = LaunchPlan(heads=4, head_tile=16, tile=16, groups=7)
    lengths = [draw.choice([0, 1, 16, 17, 40, 300, 700]) for _ in range(23)]
    made = torch.tensor(lengths, dtype=torch.int32)
    whole = schedule.split_schedule(made, plan)
    used = int(whole.bounds[-1])
    assert int((whole.rows[2] > 1).sum()) > 1
    for chunk in (2, 4, 8, 16):
        monkeypatch.setattr(schedule, "CHUNK", chunk)
        cut = schedule.split_schedule(made, plan)
        assert torch.equal(cut.rows, whole.rows), chunk
        assert torch.equal(cut.bounds, whole.bounds), chunk
        assert torch.equal(cut.entries[:used], whole.entries[:used]), chunk


@pytest.mark.parametrize("groups", [2, 3, pytest.param(5, marks=pytest.mark.slow), 7])
def test_every_tile_once(groups: int) -> None:
    """Totals of every residue modulo the groups: one row, and several that share them."""
    plan = LaunchPlan(heads=4, head_tile=16, tile=16, groups=groups, least=1)
    for extra in range(2 * groups):
        for tiles in ([9 + extra], [3, 8 + extra, 0, 5], [1] * (groups + 1) + [extra + 2]):
            lengths = torch.tensor([16 * count for count in tiles], dtype=torch.int32)
            made = schedule.split_schedule(lengths, plan)
            found: list[list[int]] = [[] for _ in tiles]
            for row, start, stop, _ in made.entries[: int(made.bounds[-1])].tolist():
                assert start < stop, f"{tiles}: an empty part"
                found[row] += range(start, stop)
            assert [sorted(each) for each in found] == [list(range(n)) for n in tiles], tiles
