"""Quantised weights stay as they are stored where kernels multiply with them so: the plan says it,
counts their bytes, and the engine's packed weights have no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trueline import native
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.models import read_model
from trueline.plan.select import PACKING
from trueline.tiny.quantise import published_storage
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.dummy import DummyWeights
from trueline.weights.ledger import balance

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="no native kernels here")
FORMATS = {"block-fp8": ("block fp8",), "int4": ("int4",), "fp4": ("fp4", "block fp8")}
WIDE = {"hidden_size": 96, "moe_intermediate_size": 64}
BASE = EngineConfig(device="cpu", max_model_len=64, max_num_seqs=2)
Tiny = Callable[..., Path]


@pytest.fixture(params=FORMATS)
def stored(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[Path, tuple[str, ...]]:
    storage = published_storage(request.param, block=32)
    directory = tiny("deepseek_v3", storage=storage, dtype="bfloat16", keys=WIDE)
    return directory, FORMATS[request.param]


def test_the_plan_says_so(stored: tuple[Path, tuple[str, ...]]) -> None:
    model, labels = stored
    plan = load_engine(model, BASE).plan
    lines = list(plan.lines())
    for label in labels:
        for op in PACKING:
            told = f"{label}: native (preferred, and runs here; weights stay as stored)"
            assert f"{op:<12} {told}" in lines
    (weights,) = (line for line in lines if line.startswith("weights "))
    assert weights.endswith(f"MB in {' and '.join((*labels, 'bfloat16'))}")
    other = load_engine(model, EngineConfig(device="cpu", max_model_len=64, ops={"mlp": "cpu"}))
    assert any(
        line.startswith("mlp") and line.endswith("cpu (asked for)") for line in other.plan.lines()
    )


def test_the_plan_counts_stored_bytes(stored: tuple[Path, tuple[str, ...]]) -> None:
    """Within 3 % of the checkpoint's."""
    model, _ = stored
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    spec = read_model(model)
    theirs = sum(use.nbytes for use in balance(checkpoint, spec).uses)
    ours = load_engine(model, BASE).plan.weight_bytes
    assert ours == pytest.approx(theirs, rel=0.03)


def test_dummy_weights_are_drawn_as_stored(stored: tuple[Path, tuple[str, ...]]) -> None:
    """In the formats of the checkpoint, about as large as plain ones, and the same every time."""
    model, labels = stored
    spec = read_model(model)

    def drawn(seed: int) -> DummyWeights:
        return DummyWeights(spec, dtype=torch.bfloat16, device=torch.device("cpu"), seed=seed)

    first, again, other = drawn(0), drawn(0), drawn(1)
    found: set[str] = set()
    for parameter in list(first):
        weight, same, differs = (each.pop(parameter) for each in (first, again, other))
        if weight.format == "dense":
            continue
        found.add(weight.format)
        numbers = weight.dequantise(torch.float32)
        assert 0.7 < float(numbers.std()) * numbers.shape[-1] ** 0.5 < 1.4
        assert torch.equal(numbers, same.dequantise(torch.float32))
        assert not torch.equal(numbers, differs.dequantise(torch.float32))
    assert found == set(labels)
