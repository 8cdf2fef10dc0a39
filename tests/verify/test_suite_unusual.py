"""Weights that are damaged or were converted wrongly, as far as their numbers show it; and healthy
ones, of which nothing is told."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from trueline.config import EngineConfig
from trueline.models import read_model
from trueline.utils.builtin import BUILTIN_MODELS, FOLDER
from trueline.verify.cases import CASES, make_subject
from trueline.verify.report import Status
from trueline.verify.report.html import page
from trueline.verify.report.junit import junit_xml
from trueline.verify.report.terminal import print_report
from trueline.verify.suite.run import Selection, verify
from trueline.verify.suite.unusual import WHOLE, look, unusual
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.ledger import balance

Change = Callable[[dict[str, Tensor]], object]
LAYER = "model.layers.2."
WEIGHT = f"{LAYER}self_attn.q_b_proj.weight"
EXPERT, OTHER = (f"{LAYER}mlp.experts.{i}.up_proj.weight" for i in (3, 7))
SCALES = f"{LAYER}self_attn.q_b_proj.weight_scale_inv"


def told(model: Path) -> list[str]:
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    return unusual(look(balance(checkpoint, read_model(model)).uses))


def damage(model: Path, change: Change) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_nothing_of_the_built_in_models(name: str) -> None:
    assert not told(FOLDER / name)


SOME = ("v2-lite", "bf16", "fp8", "int4", "fp4", "ling", "v4-fp4", "v4-base-fp8", "glm5")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SOME else [pytest.mark.slow]) for c in CASES]
)
def test_nothing_of_tiny_models(case: str, tmp_path: Path) -> None:
    assert not told(make_subject(case, tmp_path / case).model)


SEEN: dict[str, tuple[str, str, Change, str]] = {
    "zeros": ("v3-near", WEIGHT, lambda t: t[WEIGHT].zero_(), "nothing but zeros"),
    "a hole": ("v3-near", WEIGHT, lambda t: t[WEIGHT][9:].zero_(), "zeros alone in"),
    "a constant": ("v3-near", WEIGHT, lambda t: t[WEIGHT].fill_(0.5), "nothing but 0.5"),
    "a norm of zeros": (
        *("v3-near", "model.norm.weight", lambda t: t["model.norm.weight"].zero_()),
        "nothing but zeros",
    ),
    "an expert twice": (
        *("v3-near", OTHER, lambda t: t[OTHER].copy_(t[EXPERT])),
        f"the same numbers as {EXPERT}",
    ),
    "far too large": ("v3-near", EXPERT, lambda t: t[EXPERT].mul_(300), "root mean square"),
    "far too small": ("v3-near", EXPERT, lambda t: t[EXPERT].div_(300), "root mean square"),
    "no number of float16": ("v3-near", WEIGHT, lambda t: t[WEIGHT][0].fill_(7e4), "up to 7e+04"),
    "NaN": ("v3-near", WEIGHT, lambda t: t[WEIGHT][3].fill_(float("nan")), "NaN or infinity"),
    "bytes of float16": (
        *("bf16", WEIGHT),
        lambda t: t.update({WEIGHT: t[WEIGHT].half().view(torch.bfloat16)}),
        "root mean square",
    ),
    "a scale of another exponent": (
        "fp8",
        WEIGHT,
        lambda t: t[SCALES][0, 0].mul_(1e5),
        "scales of",
    ),
    "a negative scale": ("fp8", WEIGHT, lambda t: t[SCALES][0, 0].mul_(-1), "a scale is above 0"),
    "scales upside down": ("fp8", WEIGHT, lambda t: t[SCALES].reciprocal_(), ""),
    "no scales": ("fp8", WEIGHT, lambda t: t[SCALES].fill_(1), ""),
}
"""The tiny model, the weight, what is done to it and what is told."""


@pytest.mark.parametrize("what", SEEN)
def test_what_is_seen(what: str, tmp_path: Path) -> None:
    case, name, change, reason = SEEN[what]
    model = make_subject(case, tmp_path / "model").model
    damage(model, change)
    (only,) = told(model)
    assert only.startswith(f"{name}: ")
    assert reason in only


def _swapped(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT], tensors[OTHER] = tensors[OTHER], tensors[EXPERT]


UNSEEN: dict[str, tuple[str, Change]] = {
    "experts swapped": ("v3-near", _swapped),
    "rows in another order": ("v3-near", lambda t: t.update({WEIGHT: t[WEIGHT].flip(0)})),
    "read as float16": (
        "bf16",
        lambda t: t.update({WEIGHT: t[WEIGHT].view(torch.float16).to(torch.bfloat16)}),
    ),
    "scales in another order": ("fp8", lambda t: t.update({SCALES: t[SCALES].flip(0)})),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_what_no_statistics_see(what: str, tmp_path: Path) -> None:
    """As docs/verify.md says: the same numbers in another order, or of about the same size."""
    case, change = UNSEEN[what]
    model = make_subject(case, tmp_path / "model").model
    damage(model, change)
    assert not told(model)


def test_large_weights_are_looked_at_in_rows(tmp_path: Path) -> None:
    """From the first to the last, of experts stored in one tensor too."""
    model = make_subject("v3-ranks-fused", tmp_path / "model").model
    assert not told(model)
    stored = f"{LAYER}mlp.experts.down_proj"
    assert load_file(model / "model.safetensors")[stored].numel() <= WHOLE
    for name, size in ((stored, 0.0), ("model.embed_tokens.weight", 0.0)):
        damage(model, lambda t, name=name, size=size: t[name][-1].fill_(size))  # type: ignore[misc]
    assert not told(model)  # a row or an expert of zeros is nothing unusual
    damage(model, lambda t: t[stored].zero_())
    (only,) = told(model)
    assert only == f"{stored}: nothing but zeros, all of it"


def test_every_view_has_it(tmp_path: Path) -> None:
    """And the check passes: which weights are right, no number says."""
    model = make_subject("v3-near", tmp_path / "model").model
    selection = Selection(only=("preflight/weights",))
    damage(model, lambda t: t[WEIGHT].zero_())
    report = verify(model, EngineConfig(max_num_seqs=8), selection)
    (check,) = report.checks
    assert check.status == Status.PASSED
    assert report.unusual == check.unusual == [f"{WEIGHT}: nothing but zeros, all of it"]
    assert check.evidence.endswith("1 of them unusual")
    shown = io.StringIO()
    print_report(Console(file=shown, width=200), report)
    for view in (shown.getvalue(), page(report), junit_xml(report)):
        assert report.unusual[0] in view
