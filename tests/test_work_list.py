"""The list of parts of rows is made over chunks of rows: any size of a chunk gives the same."""

from __future__ import annotations

import random

import pytest
import torch

from trueline.device import interpreting
from trueline.ops.mla_decode import work
from trueline.ops.mla_decode.launch_plan import LaunchPlan

pytestmark = pytest.mark.skipif(not interpreting(), reason="chunks as small as no GPU takes them")


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_several_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are looked at together, some in several parts, some without keys."""
    draw = random.Random(seed)
    plan = LaunchPlan(heads=4, head_tile=16, tile=16, groups=7)
    lengths = [draw.choice([0, 1, 16, 17, 40, 300, 700]) for _ in range(23)]
    made = torch.tensor(lengths, dtype=torch.int32)
    whole = work.work_list(made, plan)
    used = int(whole.bounds[-1])
    assert int((whole.rows[2] > 1).sum()) > 1
    for chunk in (2, 4, 8, 16):
        monkeypatch.setattr(work, "CHUNK", chunk)
        cut = work.work_list(made, plan)
        assert torch.equal(cut.rows, whole.rows), chunk
        assert torch.equal(cut.bounds, whole.bounds), chunk
        assert torch.equal(cut.entries[:used], whole.entries[:used]), chunk
