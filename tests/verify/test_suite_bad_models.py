"""What `trueline verify` says of a checkpoint that is damaged: where, and by what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from trueline.config import EngineConfig
from trueline.layers.mla import MLA
from trueline.verify.cases import make_subject
from trueline.verify.report import Check, Report, Status
from trueline.verify.suite.run import Selection, verify


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_subject("v3-near", tmp_path / "v3").model


def damage(model: Path, name: str, change: Callable[[Tensor], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors[name])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def failed(model: Path, *only: str) -> Check:
    report: Report = verify(model, EngineConfig(max_num_seqs=8), Selection(tier="smoke", only=only))
    (check,) = report.checks
    assert check.status == Status.FAILED
    return check


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_the_first_part_that_gives_nan_is_named(model: Path, value: float) -> None:
    """And whether that is the checkpoint's doing. The engine itself only says that it stopped."""
    name = "model.layers.2.self_attn.o_proj.weight"
    damage(model, name, lambda weight: weight[0].fill_(value))
    for only, first in (("layers", 0), ("modes/mixed step", 0)):
        check = failed(model, only)
        assert check.place is not None
        assert (check.place.layer, check.place.part) == (2, "mixer")
        assert (check.place.request, check.place.position) == (0, first)
        finite = value == 3e38
        told = f"finite, the largest 3e+38 in {name}" if finite else f"such numbers in {name}"
        assert told in check.evidence
        assert "the model's logits are NaN" in check.evidence


def test_an_embedding_that_is_not_finite(model: Path) -> None:
    name = "model.embed_tokens.weight"
    damage(model, name, lambda weight: weight[:, 3].fill_(float("nan")))
    check = failed(model, "layers")
    assert check.place is not None
    assert (check.place.layer, check.place.part) == (0, "entry")
    assert name in check.evidence


def test_an_engine_that_makes_nan_of_right_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MLA.forward

    def wrong(self: MLA, x: Tensor, step: Any, views: Any, rope: Any) -> Any:
        return original(self, x, step, views, rope) / 0.0

    monkeypatch.setattr(MLA, "forward", wrong)
    check = failed(model, "layers")
    assert check.place is not None
    assert (check.place.layer, check.place.part) == (0, "mixer")
    assert "the weights there are finite" in check.evidence


def test_a_token_that_the_tokenizer_has_lost(model: Path) -> None:
    """A text that comes back without one of its letters, or a byte of some."""
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    for name, told in (("e", "without 'e'"), ("~", "without '~'"), ("¨", "0xA8")):
        tokenizer["model"]["vocab"] = {key: vocab[key] for key in vocab if key != name}
        file.write_text(json.dumps(tokenizer))
        assert told in failed(model, "preflight/tokenizer").evidence
