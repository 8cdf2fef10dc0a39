"""`trueline verify` where an engine rounds: caches in fp8, fp8 activations, numerics `published`.
A code that either may choose is no error; any other is, and it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.cache.layout import LatentFp8, LatentLayout
from trueline.config import EngineConfig
from trueline.ops.latent_write import composed
from trueline.reference import functional
from trueline.verify.cases import CASES, make_subject
from trueline.verify.faults.table import FAULTS
from trueline.verify.replay.rerun import WRONG, replay_file
from trueline.verify.report import Report, Status
from trueline.verify.rounding import fp8_rows_of
from trueline.verify.suite import ties
from trueline.verify.suite.judgement import CACHE_ROWS
from trueline.verify.suite.run import Selection, verify

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_group_size": 16}
ACTIVATIONS: dict[str, Any] = {"numerics": "activations"}
PUBLISHED: dict[str, Any] = {"numerics": "published"}
SOME = ("layers", "logits", "modes/mixed step", "modes/prefix hit", "modes/preempt and resume")
FAULT = {fault.id: fault for fault in FAULTS}


def run(case: str, place: Path, only: tuple[str, ...] = SOME, **options: Any) -> Report:
    if not (model := place / case).exists():
        make_subject(case, model)
    given = CASES[case]
    config = EngineConfig(facts=given.facts, **{"max_num_seqs": 8, **given.options, **options})
    return verify(model, config, Selection(only=only), replay_dir=place / "replays")


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("v3-near", FP8),
        ("v3-near", {"kv_cache_dtype": "e4m3fnuz", "kv_cache_scale_fmt": "ue8m0"}),
        ("v4-shallow", {"kv_cache_dtype": "fp8"}),
        ("v4-rounded", PUBLISHED),
        ("fp8-inputs", ACTIVATIONS),
    ],
    ids=str,
)
def test_what_is_rounded_is_no_error(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = run(case, tmp_path, **options)
    assert [(check.id, check.evidence) for check in report.failed] == []
    assert report.passed


def test_too_many_ties_are_not_judged(tmp_path: Path) -> None:
    """Nor is what a long context computes called wrong where that may be a tie."""
    report = run("fp8-inputs", tmp_path, ("modes/several tiles of keys",), **ACTIVATIONS)
    (check,) = report.checks
    assert check.status is Status.NOT_COVERED
    assert "ties of codes" in check.evidence


@pytest.mark.slow
def test_published_rounding_of_a_long_context(tmp_path: Path) -> None:
    (check,) = run("v4-rounded", tmp_path, ("modes/several tiles of keys",), **PUBLISHED).checks
    assert check.status is Status.PASSED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, FP8) for case in ("v2-lite", "k25", "glm", "v32-near", "glm5", "ling", "bf16")),
        *((case, ACTIVATIONS) for case in ("v32-fp8", "ling-fp8", "glm5-fp8", "v4-base-fp8")),
        ("fp8-inputs", ACTIVATIONS | FP8),
    ],
    ids=str,
)
def test_nowhere(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert run(case, tmp_path, ("layers", "logits", "modes"), **options).passed


def test_a_wrong_row_of_the_cache_is_named_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One code, in one layer: attention over it would be right."""
    write, calls = composed.run, iter(range(10**6))

    def broken(latent: Tensor, *given: Any, **options: Any) -> Tensor:
        if next(calls) % 4 == 2:  # of four layers
            latent = latent.clone()
            latent[:, 3] += latent.abs().amax(1) / 8
        return write(latent, *given, **options)

    monkeypatch.setattr(composed, "run", broken)
    report = run("v3-near", tmp_path, ("layers",), **FP8)
    (check,) = report.failed
    assert check.place is not None
    assert (check.place.layer, check.place.part) == (2, CACHE_ROWS)
    assert check.replay is not None
    monkeypatch.undo()
    replayed = replay_file(check.replay)
    assert replayed.record is not None
    assert replayed.record.wrong, "what was recorded stays wrong"
    assert replayed.code != WRONG, "and here it is right"


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("latent-codes-for-numbers", FP8),
        ("inputs-partial-group", ACTIVATIONS),
        ("keys-ties-away", PUBLISHED),
    ],
)
def test_a_mistake_of_rounding_is_found(
    fault: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = FAULT[fault].case
    with FAULT[fault].seeded():
        assert not run(case, tmp_path, ("layers", "modes/mixed step"), **options).passed


def test_either_code_of_a_tie_is_right_and_no_other() -> None:
    """448 sets the scale to 1; 17 lies in the middle between 16 and 18, and 17.5 does not."""
    row = torch.tensor([[448.0, 17.0, 3.0]], dtype=torch.float64)
    found = set()
    for draw in range(ties.DRAWS):
        with ties.moved(draw, torch.float32):
            found.add(float(functional.through_fp8(row, False)[0, 1]))
    assert found == {16.0, 18.0}
    row[0, 1] = 17.5
    for draw in range(ties.DRAWS):
        with ties.moved(draw, torch.float32):
            assert functional.through_fp8(row, False)[0].tolist() == [448.0, 18.0, 3.0]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_a_cache_in_fp8(power_of_two: bool) -> None:
    """A group's scale is its own; the key is as it is; the code is the nearest, or of a tie
    either."""
    layout = LatentLayout(6, 2, 1, LatentFp8("e4m3fn", "float32", 4, power_of_two))
    scale = 2.0**-7 if power_of_two else 3.0 / 448
    exact = torch.tensor([[3.0, 17 * scale, 0.5, -1.0, 448 / 64, 0.25, 0.3, -0.7]])
    exact = exact.double()
    held = exact.clone()
    held[:, :4] = (exact[:, :4] / scale).to(torch.float8_e4m3fn).double() * scale
    held[:, 4:6] = (exact[:, 4:6] * 64).to(torch.float8_e4m3fn).double() / 64
    off = torch.full((1, 1), 1e-6, dtype=torch.float64)

    def right(channel: int, value: float) -> bool:
        other = held.clone()
        other[0, channel] = value
        return bool(fp8_rows_of(other, exact, off, layout))

    assert bool(fp8_rows_of(held, exact, off, layout))
    assert right(1, 16 * scale)
    assert right(1, 18 * scale)
    assert not right(1, 20 * scale)
    assert not right(2, float(held[0, 2]) * 1.07), "the next code"
    assert not right(5, 0.25 * 3.0 / 7), "the scale of the other group"
    assert not right(6, 0.3 + 1e-5), "a key is not rounded"
