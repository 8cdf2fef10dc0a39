"""What `trueline verify` asks of requests that begin with what the prefix cache has, and of those
that lose what they had."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueline.config import EngineConfig
from trueline.engine.states import Held, States
from trueline.verify.cases import make_subject
from trueline.verify.report import Check, Status
from trueline.verify.suite.run import Selection, verify

AHEAD = "modes/prefix hit, one step ahead"
BETWEEN = "modes/prefix hit between snapshots"


def checked(model: Path, name: str) -> Check:
    (check,) = verify(model, EngineConfig(max_num_seqs=8), Selection(only=(name,))).checks
    return check


@pytest.mark.parametrize("case", ["ling", pytest.param("v4-shallow", marks=pytest.mark.slow)])
def test_hits_one_step_ahead(case: str, tmp_path: Path) -> None:
    check = checked(make_subject(case, tmp_path / case).model, AHEAD)
    assert check.status == Status.PASSED, check.evidence


def test_the_snapshot_read_once_more_while_the_first_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second step behind a hit would start from is its request's own state."""

    def source(self: States, held: Held, start: int) -> int | None:
        if start == 0:
            return None
        return held.source[1] if held.source else held.slot

    model = make_subject("ling", tmp_path / "ling").model
    monkeypatch.setattr(States, "_source", source)
    check = checked(model, AHEAD)
    assert check.status == Status.FAILED
    assert "linear attention is off" in check.evidence
    assert check.ran["lightning"] == "cpu", "the report names what ran, above all where it is wrong"


def test_a_hit_ends_where_a_state_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks alone are no prefix of a hybrid model. Its snapshots are where the engine keeps them
    by itself, not at every block."""
    model = make_subject("ling", tmp_path / "ling").model
    check = checked(model, BETWEEN)
    assert check.status == Status.PASSED, check.evidence
    first, *cached = map(int, check.evidence.rpartition(":")[2].split(","))
    assert first == 0
    assert cached[0] == cached[1] > 0, "blocks of the third reach further than its state"
    assert cached[2] > cached[1]
    usable = States.usable
    monkeypatch.setattr(
        States, "usable", lambda self, request, n: n if usable(self, request, n) else 0
    )
    assert checked(model, BETWEEN).status == Status.FAILED


@pytest.mark.parametrize("block_size", [1, 15, 64])
def test_requests_are_preempted_whatever_the_block_size(block_size: int, tmp_path: Path) -> None:
    """64 is a GPU's: who is admitted has room for a block more, so short answers lose nothing."""
    model = make_subject("v2", tmp_path / "v2").model
    config = EngineConfig(max_num_seqs=8, block_size=block_size)
    only = Selection(only=("modes/preempt and resume", "answers/prompt logprobs"))
    for check in verify(model, config, only).checks:
        assert check.status == Status.PASSED, check.evidence
