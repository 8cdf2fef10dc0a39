"""What the tiers of `trueline verify` have, and what the larger see that the smaller do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from trueline.cache.layout import GROUP, INDEX_LAYOUTS
from trueline.config import EngineConfig
from trueline.engine import batch
from trueline.ops.linear import torch_mm
from trueline.verify.cases import make_subject
from trueline.verify.report import Report, Status
from trueline.verify.suite import variants
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.run import Selection, all_checks, verify
from trueline.verify.suite.session import Session
from trueline.verify.suite.variants import Variant


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_subject("v3-near", tmp_path_factory.mktemp("models") / "v3").model


def run(model: Path, *only: str, tier: str = "full", **options: Any) -> Report:
    config = EngineConfig(**{"max_num_seqs": 8, **options})
    return verify(model, config, Selection(tier=tier, only=only))  # type: ignore[arg-type]


def test_each_tier_has_all_of_the_one_before(model: Path) -> None:
    numbers = Numbers(Session("v3", model, EngineConfig(max_num_seqs=8)))
    smoke, standard, full = (
        {todo.id for todo in all_checks(numbers, tier)} for tier in ("smoke", "standard", "full")
    )
    assert smoke < standard < full
    more = full - standard
    assert {"modes/long context", "variants/--batch-invariant"} <= more
    assert {"variants/--block-size 1", "variants/--kv-cache-dtype fp8"} <= more
    assert "variants/--op linear=reference" in more


def test_a_variant_that_is_wrong_fails_and_says_how_to_run_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plan did not choose is not run by the other tiers but on data of its own."""
    plain = torch_mm.run

    def broken(x: Tensor, *given: Any) -> Tensor:
        made: Tensor = plain(x, *given)
        return made * (1 + 2.0**-10) if len(x) == 1 else made

    monkeypatch.setattr(torch_mm, "run", broken)
    report = run(model, "variants/--op linear=*", "layers")
    wrong = {check.id: check for check in report.failed}
    assert wrong.keys() == {"variants/--op linear=torch_mm"}
    (check,) = wrong.values()
    assert check.place is not None
    assert "decode" in (check.place.path or "")
    assert check.evidence.endswith(f"trueline verify {model} --op linear=torch_mm")


def test_variants_that_the_engine_refuses_are_not_covered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Variant("--block-size 0", {"block_size": 0})
    monkeypatch.setattr(variants, "variants", lambda session: [odd])
    (check,) = run(model, "variants").checks
    assert check.status is Status.NOT_COVERED
    assert "refuses" in check.evidence


def test_the_last_blocks_of_a_cache_are_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's number that is cut off where rows are written: other compositions' caches are
    smaller."""
    plain = batch.cells

    def cut(block_size: int, block_ids: list[int], start: int, stop: int) -> list[int]:
        return plain(block_size, [block & 0xFFF for block in block_ids], start, stop)

    monkeypatch.setattr(batch, "cells", cut)
    some = "modes/highest blocks", "modes/mixed step"
    report = run(model, *some, tier="standard", canary_interval=0)
    assert [check.id for check in report.failed] == ["modes/highest blocks"]
    (check,) = report.failed
    assert check.place is not None
    # what nobody has written may be NaN, which stops the engine before its blocks are told
    assert check.place.block is None or check.place.block >= 4096


def test_index_layouts_are_tried_in_blocks_of_several_groups(tmp_path: Path) -> None:
    """Of a block with one group alone, groups that overlap have nothing to overlap with."""
    model = make_subject("glm5", tmp_path / "glm5").model
    session = Session("glm5", model, EngineConfig(max_num_seqs=8))
    changed = [each.changes for each in variants.variants(session)]
    sizes = {
        each["index_cache_layout"]: each["block_size"]
        for each in changed
        if "index_cache_layout" in each
    }
    assert sizes.keys() == set(INDEX_LAYOUTS)
    assert all(size >= 2 * GROUP for size in sizes.values())
