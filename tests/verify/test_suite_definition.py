"""The definition against itself and against plain Python; what both sides read of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.config import EngineConfig
from trueline.ops.registry import OPS
from trueline.verify.cases import CASES, make_subject
from trueline.verify.checks import CHECKS, NEEDS
from trueline.verify.faults.table import FAULTS
from trueline.verify.report import Status
from trueline.verify.suite import readings
from trueline.verify.suite.effects import not_applied
from trueline.verify.suite.judgement import ITSELF, ITSELF_GATE
from trueline.verify.suite.outcome import carry_out
from trueline.verify.suite.run import Selection, verify
from trueline.verify.suite.session import Session

BY_ID = {fault.id: fault for fault in FAULTS}


def made(name: str, tmp_path: Path, **options: Any) -> tuple[Path, EngineConfig]:
    case = CASES[name]
    model = make_subject(name, tmp_path / name).model
    return model, EngineConfig(facts=case.facts, **{**case.options, **options})


@pytest.mark.parametrize(
    ("fault", "check", "layer"),
    [
        ("bias-in-weights", "definition/layers", 1),
        ("absorbed-no-rope-key", "definition/layers", 0),
        ("highest-index-wins", "definition/routing", None),
        ("fp4-nibble-order", "weights/stored numbers", None),
        ("float64-table", "definition/angles", 0),
    ],
)
def test_a_mistake_that_the_engine_s_choices_hide(
    fault: str, check: str, layer: int | None, tmp_path: Path
) -> None:
    seeded = BY_ID[fault]
    model, config = made(seeded.case, tmp_path)
    with seeded.seeded():
        report = verify(model, config, Selection(only=("layers", check)))
    failed = {each.id: each for each in report.failed}
    assert "layers/each half" not in failed
    place = failed[check].place
    assert (place and place.layer) == layer


@pytest.mark.parametrize("name", ["ling", "glm5"])
def test_the_definition_is_itself_by_far(name: str, tmp_path: Path) -> None:
    """Rounding of float64 is many orders below what is accepted."""
    report = verify(*made(name, tmp_path), Selection(only=("definition/layers",)))
    (check,) = report.checks
    assert check.status == Status.PASSED, check.evidence
    (measure,) = check.measures
    assert (measure.name, measure.gate) == (ITSELF, ITSELF_GATE)
    assert measure.value < ITSELF_GATE / 1000


def test_coarse_angles_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("v3", *made("v3", tmp_path))
    todo = next(each for each in readings.checks(session) if each.id == "definition/angles")
    assert carry_out(todo).status == Status.PASSED
    plain = Session.angles

    def coarse(self: Session, positions: torch.Tensor) -> Any:
        return [
            pair and tuple(x.bfloat16().float() for x in pair) for pair in plain(self, positions)
        ]

    monkeypatch.setattr(Session, "angles", coarse)
    check = carry_out(todo)
    assert check.status == Status.FAILED
    assert "wrong in all layers" in check.evidence


def test_an_option_that_the_plan_has_not(tmp_path: Path) -> None:
    seeded = BY_ID["latent-storage-ignored"]
    model, config = made(seeded.case, tmp_path)
    with seeded.seeded():
        report = verify(model, config, Selection(only=("options/plan",)))
    (check,) = report.failed
    assert "kv_cache_dtype = 'fp8' asks for e4m3fn" in check.evidence


def test_an_op_that_the_plan_has_not(tmp_path: Path) -> None:
    session = Session("v3-near", *made("v3-near", tmp_path))
    chosen = session.plan.selections["linear"].name
    other = next(name for name in OPS["linear"] if name != chosen)
    config = EngineConfig(ops={"linear": other})
    assert not_applied(config, [], session.plan) == [
        f"op linear={other} was given, and the plan has {chosen}"
    ]


def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    seeded = BY_ID["rank-sums-first"]
    model, config = made(seeded.case, tmp_path)
    wanted = Selection(only=("layers", "modes/the bits of one rank*"))
    assert verify(model, config, wanted).passed
    with seeded.seeded():
        report = verify(model, config, wanted)
    assert "bits differ" in report.failed[0].evidence


def test_what_is_not_met_is_checked_elsewhere() -> None:
    assert NEEDS.keys() <= CHECKS.keys()
