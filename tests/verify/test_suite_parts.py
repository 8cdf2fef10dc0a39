"""Rows in several parts, as long contexts have them, in the compositions of short ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.layers import entry_indexer, indexer
from trueline.ops.compress import cpu as compress
from trueline.ops.lightning import cpu as lightning
from trueline.ops.mla_prefill import cpu as mla_prefill
from trueline.verify.cases import make_subject
from trueline.verify.report import Check, Status
from trueline.verify.suite.run import Selection, verify
from trueline.verify.suite.small_parts import SIZES, small_parts

NAME = "modes/in small parts"


def checked(case: str, tmp_path: Path) -> Check:
    model = make_subject(case, tmp_path / case).model
    report = verify(model, EngineConfig(max_num_seqs=8), Selection(only=(NAME,)))
    (check,) = report.checks
    return check


@pytest.mark.parametrize("case", ["v3-near", "ling", "glm5", "v4-shallow"])
def test_a_healthy_engine_passes(case: str, tmp_path: Path) -> None:
    check = checked(case, tmp_path)
    assert check.status == Status.PASSED, check.evidence


def test_sizes_are_small_and_come_back() -> None:
    usual = {key: getattr(*key) for key in SIZES}
    with small_parts():
        assert all(getattr(*key) == size < usual[key] for key, size in SIZES.items())
    assert {key: getattr(*key) for key in SIZES} == usual


def choosing(scores: Any, topk: Any, q: Any, weights: Any, step: Any, view: Any, n: int) -> Tensor:
    """Every part has the lengths of the first one's rows."""
    parts = [
        (scores.run(q[rows], weights[rows], view, prepared), step.lengths[: len(q[rows])])
        for rows, prepared in step.scores
    ]
    return torch.cat([topk.run(*part, n) for part in parts])


def forgetful(original: Callable[..., Any]) -> Callable[..., Any]:
    """Behind the first part of a row's queries, the mask is the first part's."""

    def broken(scores: Tensor, first_query: int, first_key: int) -> None:
        original(scores, first_query - first_query % 2, first_key)

    return broken


@pytest.mark.parametrize(
    ("case", "owner", "function", "broken"),
    [
        ("glm5", indexer, "best_places", choosing),
        ("v4-shallow", entry_indexer, "best_places", choosing),
        ("v3-near", mla_prefill, "_hide_later", forgetful(mla_prefill._hide_later)),
    ],
)
def test_a_mistake_between_parts_is_seen(
    case: str,
    owner: Any,
    function: str,
    broken: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, function, broken)
    assert checked(case, tmp_path).status == Status.FAILED


@pytest.mark.parametrize(
    ("case", "owner", "function"),
    [("ling", lightning, "_outputs"), ("v4-shallow", compress, "_pooled")],
)
def test_there_are_parts(
    case: str, owner: Any, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More calls than the same requests take in parts of the usual size."""
    original, calls = getattr(owner, function), [0]

    def counted(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        return original(*given, **more)

    monkeypatch.setattr(owner, function, counted)
    model = make_subject(case, tmp_path / case).model
    found = []
    for sizes in (SIZES, {}):
        monkeypatch.setattr("trueline.verify.suite.small_parts.SIZES", sizes)
        calls[0] = 0
        verify(model, EngineConfig(max_num_seqs=8), Selection(only=(NAME,)))
        found.append(calls[0])
    small, usual = found
    assert small > usual > 0
