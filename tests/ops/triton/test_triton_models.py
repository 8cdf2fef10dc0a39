"""A tiny model of each kind with every op a GPU has, interpreted, against the float64 reference:
what stands between the ops is tested nowhere else without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trueline.config import EngineConfig
from trueline.device import find_device, interpreting
from trueline.models import read_model
from trueline.ops.registry import OPS
from trueline.plan.plan import make_plan
from trueline.verify.engine import Ask, oracle, run
from trueline.verify.schedules import prompt

CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=2, num_gpu_blocks_override=20, block_size=6, poison=True
)
ASKS = [Ask(prompt(18), 2), Ask(prompt(5), 2, arrives=1)]
"""More tokens than attend in the latent; a step of decode and prefill; two rows that decode."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups by their best, shared experts among the routed": ("deepseek_v2", {}),
    "groups by their best two, a bias": ("deepseek_v3", {}),
    "hybrid": ("bailing_moe_v2_5", {"num_hidden_layers": 3, "layer_group_size": 2}),
    "sparse": ("deepseek_v32", {"index_topk": 7}),
    "sparse, shared selections": (
        "glm_moe_dsa",
        {"index_topk": 7, "num_hidden_layers": 3, "index_topk_freq": 2},
    ),
}


def _param(kind: str) -> Any:
    """What others have is in test_triton_route.py and in "sparse, shared selections"."""
    quick = kind in ("hybrid", "sparse, shared selections")
    return pytest.param(kind, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.skipif(not interpreting(), reason="on a GPU they run by themselves")
@pytest.mark.parametrize("kind", [_param(kind) for kind in MODELS])
def test_oracle(kind: str, tiny: Callable[..., Path]) -> None:
    family, keys = MODELS[kind]
    model = tiny(family, keys={"num_hidden_layers": 2} | keys)
    used = make_plan(read_model(model, {}), CONFIG, find_device("cpu")).selections
    ops = {op: "triton" for op in used if "triton" in OPS[op]}
    assert len(ops) == len(used)
    oracle(model, ASKS, run(model, ASKS, CONFIG, ops=ops))
    if "hybrid" in kind or "sparse" in kind:
        fp8 = run(model, ASKS, CONFIG, ops=ops, kv_cache_dtype="fp8", kv_cache_group_size=16)
        assert fp8.stored
        oracle(model, ASKS, fp8)
