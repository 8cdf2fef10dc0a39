"""What `trueline verify` asks of requests that begin with what the prefix cache has."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueline.config import EngineConfig
from trueline.engine.states import Held, States
from trueline.verify.cases import make_subject
from trueline.verify.report import Check, Status
from trueline.verify.suite.run import Selection, verify

AHEAD = "modes/prefix hit, one step ahead"


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
