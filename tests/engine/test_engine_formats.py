"""Every stored format with the families that are published in it: the engine equals the reference,
which dequantises by its own reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.verify.cases import BASE_FP8, FP4, FP8_32, FP8_UE8M0, INT4, INT4_ALL
from trueline.verify.engine import oracle, run, serve
from trueline.verify.ranks import ranks_are_as_one, serve_on_ranks
from trueline.verify.schedules import MIXED
from trueline.weights.formats import Storage
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.pack_int4 import PackInt4

Tiny = Callable[..., Path]
BASE = EngineConfig(max_model_len=400, max_num_seqs=8, num_gpu_blocks_override=400, block_size=16)
# Whole groups, and what two ranks can divide.
WIDTHS = {
    "hidden_size": 96,
    "intermediate_size": 90,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
}
GROUP_128 = {"hidden_size": 384, "moe_intermediate_size": 128}
GROUP_8 = {"intermediate_size": 88, "kv_lora_rank": 40, "q_lora_rank": 48, "v_head_dim": 12}
LING = BlockFp8(
    block=(32, 32), power_of_two_scales=False, ignored_modules=("g_proj", "0.mlp.up_proj")
)
V4 = {"hidden_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 4}
KIMI_128 = PackInt4(group=128, ignored_modules=INT4.ignored_modules)


@dataclass(frozen=True)
class Published:
    family: str
    storage: Storage
    formats: set[str]
    keys: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=lambda: WIDTHS)


STORED = {
    "v3": Published("deepseek_v3", FP8_32, {"block fp8"}),
    "v3-ue8m0": Published("deepseek_v3", FP8_UE8M0, {"block fp8"}),
    "v32": Published("deepseek_v32", FP8_UE8M0, {"block fp8"}),
    "v32-float32": Published("deepseek_v32", FP8_32, {"block fp8"}),
    "glm5": Published("glm_moe_dsa", FP8_32, {"block fp8"}),
    "glm5-ue8m0": Published("glm_moe_dsa", FP8_UE8M0, {"block fp8"}),
    "ling": Published("bailing_moe_v2_5", LING, {"block fp8"}, {"layer_group_size": 2}),
    "ling-ue8m0": Published("bailing_moe_v2_5", FP8_UE8M0, {"block fp8"}, {"layer_group_size": 2}),
    "k2-fp8": Published("kimi_k2", FP8_32, {"block fp8"}),
    "k2": Published("kimi_k2", INT4, {"int4"}),
    "k2-128": Published("kimi_k2", KIMI_128, {"int4"}, GROUP_128),
    "k2-all": Published("kimi_k2", INT4_ALL, {"int4"}, GROUP_8),
    "k25": Published("kimi_k25", INT4, {"int4"}),
    "v3-fp4": Published("deepseek_v3", FP4, {"fp4", "block fp8"}),
    "v4": Published("deepseek_v4", FP4, {"fp4", "block fp8"}, widths=V4),
    "v4-base": Published("deepseek_v4", BASE_FP8, {"block fp8"}, widths=V4),
}


@pytest.fixture
def made(tiny: Tiny) -> Any:
    def make(name: str) -> Path:
        stored = STORED[name]
        return tiny(stored.family, keys={**stored.widths, **stored.keys}, storage=stored.storage)

    return make


@pytest.mark.parametrize("name", STORED)
def test_mixed_steps_equal_the_reference(name: str, made: Any) -> None:
    model = made(name)
    engine = load_engine(model, replace(BASE, block_size=3))
    lines = list(engine.plan.lines())
    for label in ("block fp8", "int4", "fp4"):
        assert any(f" {label}: " in line for line in lines) == (label in STORED[name].formats)
    oracle(model, MIXED, serve(engine.core, MIXED))
    engine.core.close()


@pytest.mark.parametrize("name", ["ling", "k2-all", "v3-fp4"])
def test_batch_invariant_steps_equal_the_reference(name: str, made: Any) -> None:
    model = made(name)
    oracle(model, MIXED, run(model, MIXED, BASE, max_num_batched_tokens=13, batch_invariant=True))


@pytest.mark.parametrize("name", ["v3", "ling", "k2-all", "k25", "v3-fp4"])
def test_two_ranks_equal_the_reference(name: str, made: Any) -> None:
    model = made(name)
    for done in serve_on_ranks(model, MIXED, BASE, 2):
        oracle(model, MIXED, done)


@pytest.mark.parametrize("name", ["v3", "k2-all", "v3-fp4"])
def test_eight_ranks_have_the_bits_of_one(name: str, tiny: Tiny) -> None:
    """12 columns of the dense MLP for each: their edges cut through words, groups and blocks."""
    stored = STORED[name]
    divisible = {"intermediate_size": 96, "n_routed_experts": 16, "num_attention_heads": 8}
    keys = WIDTHS | stored.keys | divisible
    model = tiny(stored.family, keys=keys, storage=stored.storage)
    ranks_are_as_one(model, MIXED, replace(BASE, batch_invariant=True), 8)
