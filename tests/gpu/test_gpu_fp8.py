"""Block fp8 with activations in fp8 on a Hopper GPU: ops against the definition in float64, tiny
models against the noise that the definition has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.device import compute_capability, hopper_refusals
from trueline.ops.registry import OPS, capabilities, implementation
from trueline.verify.engine import Ask, EngineRun, run
from trueline.verify.numerics import Noise, exact_logprobs, load_activations
from trueline.verify.ops import FP8_CHECKS, OpCheck
from trueline.verify.schedules import prompt
from trueline.weights.formats.base_fp8 import BaseFp8
from trueline.weights.formats.block_fp8 import BlockFp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
    pytest.mark.skipif(
        torch.cuda.is_available() and bool(hopper_refusals(compute_capability())),
        reason="no Hopper GPU",
    ),
]
FP8_INPUTS = [
    pytest.param(op, name, checks[0], id=f"{op}-{name}")
    for op, checks in FP8_CHECKS.items()
    for name in OPS[op]
    if "cuda" in capabilities(op, name).devices and "activations" in capabilities(op, name).numerics
]


@pytest.mark.parametrize(("op", "name", "check"), FP8_INPUTS)
def test_op_with_fp8_inputs(op: str, name: str, check: OpCheck) -> None:
    with torch.device("cuda"):
        check.run(implementation(op, name), torch.bfloat16)


# Whole blocks of 128, which the GEMMs of fp8 take.
WHOLE_BLOCKS = {"hidden_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
KEYS = WHOLE_BLOCKS | {"intermediate_size": 384, "v_head_dim": 64, "num_hidden_layers": 2}
V4_KEYS = WHOLE_BLOCKS | {"num_hidden_layers": 4}


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_fp8_activations_are_inside_the_band(
    family: str, powers_of_two: bool, tiny: Callable[..., Path]
) -> None:
    """No farther from the exact model than what the definition of these numerics makes of it,
    beside what bfloat16 does; and not much nearer, as without them."""
    v4 = family == "deepseek_v4"
    storage = (BaseFp8 if v4 else BlockFp8)(
        block=(128, 128), power_of_two_scales=powers_of_two, ignored_modules=()
    )
    model = tiny(family, keys=V4_KEYS if v4 else KEYS, storage=storage)
    asks = [
        Ask(prompt(200), 4),
        *(Ask(prompt(1 + i, seed=i), 3, arrives=i // 4) for i in range(30)),
    ]
    config = EngineConfig(device="cuda", dtype="bfloat16", max_model_len=400, max_num_seqs=8)
    half, ours = (run(model, asks, replace(config, numerics=each)) for each in ("weights", "auto"))
    plan = ours.core.plan
    assert plan.numerics.name == "activations"
    assert {each.name for each in plan.by_format[BlockFp8.label].values()} == {"hopper_fp8"}
    of_half, of_ours = (Noise.of(*_both(model, asks, done)) for done in (half, ours))
    quantised, sequences = load_activations(model), _sequences(asks, ours)
    exact = exact_logprobs(model, sequences)
    with torch.no_grad():
        made = [quantised.logprobs(each) for each in sequences]
    band = Noise.of(torch.cat(exact), torch.cat(made))
    print(f"{family}: bfloat16 {of_half}, fp8 activations {of_ours}, band {band}")
    assert of_ours.mean_kl <= 2 * (band.mean_kl + of_half.mean_kl)
    assert of_ours.mean_kl >= band.mean_kl / 4


def _sequences(asks: list[Ask], done: EngineRun) -> list[Tensor]:
    return [
        torch.tensor([*ask.prompt, *tokens][:-1])
        for ask, tokens in zip(asks, done.tokens, strict=True)
    ]


def _both(model: Path, asks: list[Ask], done: EngineRun) -> tuple[Tensor, Tensor]:
    """Logprobs of every position: by the reference, and those that were computed."""
    sequences = _sequences(asks, done)
    ours = [
        torch.stack([done.logits[i][p] for p in range(len(each))]).double().cpu().log_softmax(-1)
        for i, each in enumerate(sequences)
    ]
    return torch.cat(exact_logprobs(model, sequences)), torch.cat(ours)
