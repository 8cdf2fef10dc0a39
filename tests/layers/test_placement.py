"""What a rank has and what it exchanges fit together, or the model is not built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.runner import build_decoder
from trueline.models import read_model
from trueline.parallel.collective import Threads
from trueline.parallel.placement import Placement, PlacementError, added, after_gemm
from trueline.plan.plan import make_plan
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.mixer import MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.shard import local_spec
from trueline.spec.source import Span
from trueline.weights.dummy import DummyWeights

Change = Callable[[LayerSpec], LayerSpec]
KEYS = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
        "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
HALF, ALL = Span(0, 4, 8), Span.whole(8)
R, P, D = Placement.REPLICATED, Placement.PARTIAL, Placement.DIVIDED


@pytest.mark.parametrize(
    ("x", "outputs", "inputs", "wanted"),
    [(R, ALL, ALL, R), (R, HALF, ALL, D), (D, ALL, HALF, P), (D, HALF, HALF, None),
     (D, ALL, ALL, None), (P, ALL, ALL, None), (R, ALL, HALF, None), (P, ALL, HALF, None)],
)  # fmt: skip
def test_after_a_gemm(x: Placement, outputs: Span, inputs: Span, wanted: Placement | None) -> None:
    if wanted is None:
        with pytest.raises(PlacementError, match="o_proj"):
            after_gemm("o_proj", x, outputs=outputs, inputs=inputs)
    else:
        assert after_gemm("o_proj", x, outputs=outputs, inputs=inputs) is wanted


@pytest.mark.parametrize("parts", [(P, R), (R, P), (D, P), (D, R)])
def test_only_alikes_are_added(parts: tuple[Placement, ...]) -> None:
    with pytest.raises(PlacementError, match="an exchange fits one of them only"):
        added("mlp", *parts)
    assert added("mlp", parts[0], parts[0]) is parts[0]


def in_moe(**changes: Span) -> Change:
    def change(layer: LayerSpec) -> LayerSpec:
        spec = layer.feed_forward
        if not isinstance(spec, MoESpec):
            return layer
        return replace(layer, feed_forward=replace(spec, **changes))

    return change


def dense_whole(layer: LayerSpec) -> LayerSpec:
    spec = layer.feed_forward
    if not isinstance(spec, DenseSpec):
        return layer
    return replace(layer, feed_forward=replace(spec, width=Span.whole(spec.width.total)))


def build(model: Path, size: int, change: Change, *, expert_parallel: bool = False) -> None:
    spec = local_spec(read_model(model), 1, size, expert_parallel=expert_parallel)
    changed = replace(spec, layers=tuple(change(layer) for layer in spec.layers))
    _decoder(changed, changed, size)


def _decoder(spec: ModelSpec, weights: ModelSpec, size: int) -> None:
    plan = make_plan(spec, EngineConfig(device="cpu", max_model_len=32), find_device("cpu"))
    values = DummyWeights(weights, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    build_decoder(spec, plan, values, Threads(size).rank(1))


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("deepseek_v3", keys=KEYS)


@pytest.mark.parametrize(
    ("change", "expert_parallel", "words"),
    [
        (in_moe(shared_width=Span.whole(24)), False, "adds what is partial and replicated"),
        (in_moe(expert_width=Span.whole(24)), False, "adds what is replicated and partial"),
        (in_moe(expert_width=Span.whole(24), shared_width=Span.whole(24)), False,
         r"mlp: an all-reduce of what is replicated would count it 2 times"),
        (in_moe(expert_width=Span(12, 24, 24)), True, "divided whole and by width at once"),
        (dense_whole, False, "an all-reduce of what is replicated would count it 2 times"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(
    change: Change, expert_parallel: bool, words: str, model: Path
) -> None:
    with pytest.raises(PlacementError, match=words):
        build(model, 2, change, expert_parallel=expert_parallel)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_that_fit(size: int, expert_parallel: bool, model: Path) -> None:
    build(model, size, lambda layer: layer, expert_parallel=expert_parallel)


def test_weights_of_other_ranks(model: Path) -> None:
    """Cut for four ranks, in a model on two."""
    whole = read_model(model)
    local, other = local_spec(whole, 1, 2), local_spec(whole, 1, 4)
    assert isinstance(local.layers[0].mixer, MLASpec)
    with pytest.raises(PlacementError, match=r"this rank's part is .* its spec wants"):
        _decoder(local, other, 2)
