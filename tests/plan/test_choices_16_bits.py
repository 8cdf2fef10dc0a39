"""Experts chosen while everything else is computed in 16 bits: the same as in float64, although the
correction biases are so large that 16 bits could not tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trueline.config import EngineConfig
from trueline.layers.feedforward import MoE
from trueline.plan import plan
from trueline.verify.engine import Ask, run
from trueline.verify.schedules import prompt

BIAS = "e_score_correction_bias"
LARGE = 8.0
"""Where neighbours of float16 lie 2^-7 apart, and those of bfloat16 2^-5."""
UNSURE = 1e-5
"""Scores that are nearer may change places in float32: sums of a hundred terms, and a bias."""


def large_biases(model: Path) -> list[tuple[Tensor, Tensor]]:
    """Written into the checkpoint; router and bias of each layer with experts, as stored."""
    found: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for number, name in enumerate(sorted(name for name in tensors if name.endswith(BIAS))):
            spread = torch.randn(
                len(tensors[name]), generator=torch.Generator().manual_seed(number)
            )
            tensors[name] = LARGE + spread / 64
        save_file(tensors, file)
        found |= tensors
    names = [name.removesuffix(BIAS) for name in sorted(found) if name.endswith(BIAS)]
    return [(found[f"{name}weight"], found[f"{name}{BIAS}"]) for name in names]


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [("bfloat16", {}), ("float16", {}), ("float16", {"route": "triton"})],
    ids=["bfloat16", "float16", "float16-triton"],
)
def test_choices_are_those_of_float64(
    dtype: str, ops: dict[str, str], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"n_group": 1, "topk_group": 1, "num_hidden_layers": 3}
    model = tiny("deepseek_v3", keys=groups, dtype="bfloat16", seed=17)
    layers = large_biases(model)
    seen: list[tuple[MoE, Tensor, Tensor]] = []
    plain = MoE._route

    def watched(self: MoE, x: Tensor, forced: Any) -> tuple[Tensor, Tensor]:
        made = plain(self, x, forced)
        seen.append((self, x, made[0]))
        return made

    monkeypatch.setattr(MoE, "_route", watched)
    # on a CPU that is faster in float32 too
    monkeypatch.setattr(plan, "choose_compute_dtype", lambda storage, device: (storage, "asked"))
    config = EngineConfig(max_model_len=64, num_gpu_blocks_override=20, dtype=dtype, ops=ops)
    run(model, [Ask(prompt(40), 2)], config)
    assert {x.dtype for _, x, _ in seen} == {getattr(torch, dtype)}
    order = list(dict.fromkeys(id(moe) for moe, _, _ in seen))
    assert len(order) == len(layers)
    sure = 0
    for moe, x, ids in seen:
        router, bias = (each.double() for each in layers[order.index(id(moe))])
        choice = torch.sigmoid(x.double() @ router.T) + bias
        top = choice.topk(ids.shape[1] + 1, dim=1)
        clear = top.values[:, -2] - top.values[:, -1] > UNSURE
        wanted = top.indices[:, :-1].sort(1).values
        assert torch.equal(ids.sort(1).values[clear], wanted[clear])
        sure += int(clear.sum())
    assert sure > 0.9 * sum(len(ids) for _, _, ids in seen)
