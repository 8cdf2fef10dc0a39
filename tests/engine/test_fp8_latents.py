"""Latents in fp8: every position equals the reference over the rows that were stored, bits are a
request's own, and the memory that rows no longer take holds more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spread import diagonal
from trueline import reference
from trueline.cache.kinds.latent import Latent
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.loading import load_engine
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.tiny.configs import family_config
from trueline.verify.cases import make_subject
from trueline.verify.drafts import DRAFT_CHECKS
from trueline.verify.engine import Ask, decode_is_prefill, oracle, run, same, same_bits_under
from trueline.verify.failed import CheckFailed
from trueline.verify.ranks import ranks_are_as_one
from trueline.verify.schedules import MIXED, prompt

Tiny = Callable[..., Path]
FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "kimi_k25", "glm4_moe_lite"),
    *("bailing_moe_v2_5", "deepseek_v32", "glm_moe_dsa"),
)
STORAGES: dict[str, dict[str, Any]] = {
    "groups of 16": {"kv_cache_dtype": "fp8", "kv_cache_group_size": 16},
    "groups of 5, powers of two": {
        "kv_cache_dtype": "e4m3fn",
        "kv_cache_group_size": 5,
        "kv_cache_scale_fmt": "ue8m0",
    },
    "a token": {"kv_cache_dtype": "e4m3fnuz", "kv_cache_group_size": "token"},
}
BASE = EngineConfig(
    max_model_len=400, max_num_seqs=7, num_gpu_blocks_override=600, block_size=16, poison=True
)
FP8 = replace(BASE, **STORAGES["groups of 16"])
INVARIANT = replace(FP8, batch_invariant=True)


@pytest.mark.parametrize(("name", "family"), diagonal(STORAGES, FAMILIES))
def test_every_position_equals_the_reference(name: str, family: str, tiny: Tiny) -> None:
    """Of what was stored; and not of what was computed."""
    model = tiny(family)
    done = run(model, MIXED, replace(BASE, **STORAGES[name]), block_size=3)
    oracle(model, MIXED, done)
    done.stored = ()
    with pytest.raises(CheckFailed):
        oracle(model, MIXED, done)


def test_the_implementations_in_torch(tiny: Tiny) -> None:
    ops = {"mla_decode": "cpu", "linear": "torch_mm"}
    done = run(tiny("deepseek_v3"), MIXED, FP8, ops=ops)
    oracle(tiny("deepseek_v3"), MIXED, done)


def test_the_references_of_ops(tiny: Tiny) -> None:
    ops = dict.fromkeys(("latent_write", "mla_decode", "mla_prefill"), "reference")
    done = run(tiny("deepseek_v3"), MIXED[:2], FP8, ops=ops)
    oracle(tiny("deepseek_v3"), MIXED[:2], done)


def test_bfloat16(tiny: Tiny) -> None:
    """A row has its key in bfloat16; what is read is rounded to it."""
    model = tiny("deepseek_v3", dtype="bfloat16")
    ops = {"mla_decode": "cpu"}
    plan = load_engine(model, replace(FP8, ops=ops)).plan
    kind = plan.kind(Latent)
    assert kind is not None
    assert kind.layout.fp8 is not None
    assert kind.layout.fp8.rope == str(plan.compute_dtype).removeprefix("torch.")


SCHEDULES: dict[str, dict[str, Any]] = {
    "split": {"max_num_batched_tokens": 8},
    "no poison, blocks of 3": {"poison": False, "block_size": 3},
    "one step ahead": {"overlap": True, "max_num_batched_tokens": 40},
    "tight": {"num_gpu_blocks_override": 18, "block_size": 8, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_bits_do_not_depend_on_the_schedule(family: str, tiny: Tiny) -> None:
    same_bits_under(tiny(family), MIXED, INVARIANT, SCHEDULES)


def test_decode_is_prefill(tiny: Tiny) -> None:
    decode_is_prefill(tiny("deepseek_v3"), Ask(prompt(20, 4), 40), INVARIANT)


def test_a_prefix_hit_reads_what_was_stored(tiny: Tiny) -> None:
    head = prompt(48, 7)
    asks = [Ask([*head, 1, 2], 6), Ask([*head, 4, 5], 6, arrives=9)]
    warm = run(tiny("deepseek_v3"), asks, INVARIANT)
    assert warm.cached == [0, 48]
    cold = run(tiny("deepseek_v3"), asks, INVARIANT, enable_prefix_caching=False)
    same("prefix hit", warm, cold, bitwise=True)


@pytest.mark.parametrize("case", ["v3", "ling"])
def test_drafts_have_the_bits_of_plain_decoding(case: str, tmp_path: Path) -> None:
    subject = make_subject(case, tmp_path / case)
    options = {**STORAGES["groups of 16"], "batch_invariant": True}
    DRAFT_CHECKS["drafts = plain"](replace(subject, options=options))


def test_ranks_have_the_bits_of_one(tiny: Tiny) -> None:
    keys = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
            "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
    asks = [Ask(prompt(70), 4), Ask(prompt(7), 4, arrives=1)]
    ranks_are_as_one(tiny("deepseek_v3", keys=keys), asks, INVARIANT, 2, 4)


def test_the_noise_is_there_and_small(tiny: Tiny) -> None:
    """Against the exact model: never gated tightly, `trueline bench cache-noise` measures it."""
    model, tokens = tiny("deepseek_v3"), prompt(90)
    done = run(model, [Ask(tokens, 1)], FP8)
    with torch.no_grad():
        exact = reference.load(model).logprobs(tokens)
    # at most positions: where the rounding chooses other experts it is large
    off = float((done.logprobs(0) - exact).abs().amax(-1).median())
    assert 1e-4 < off < 0.5, off


def test_smaller_rows_make_more_blocks(write_config: Callable[[Any], Path]) -> None:
    config = family_config("deepseek_v3") | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    spec = read_model(write_config(config))
    # guards of canaries have a part of the memory too
    options = {"kv_cache_memory_bytes": 8_000_000, "block_size": 4, "canary_interval": 0}

    def blocks(**more: Any) -> int:
        return make_plan(spec, EngineConfig(**options, **more), find_device("cpu")).num_blocks

    # 576 float32 numbers; 512 codes, four scales and 64 float32 numbers
    assert blocks() == 8_000_000 // (spec.num_layers * 4 * 2304)
    assert blocks(kv_cache_dtype="fp8") == 8_000_000 // (spec.num_layers * 4 * 784)
    fine = blocks(kv_cache_dtype="fp8", kv_cache_group_size=64)
    assert fine == 8_000_000 // (spec.num_layers * 4 * 800)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "37 + 10 numbers in float32, 188 bytes a token and layer"),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            "37 numbers in e4m3fn with a float32 scale per 37 of them, 10 in float32, 84 bytes",
        ),
        (
            STORAGES["groups of 5, powers of two"],
            "e4m3fn with a power-of-two scale per 5 of them, 10 in float32, 112 bytes a token",
        ),
    ],
)
def test_the_plan_tells(options: dict[str, Any], told: str, tiny: Tiny) -> None:
    lines = load_engine(tiny("deepseek_v3"), replace(BASE, **options)).plan.lines()
    assert told in next(line for line in lines if line.startswith("latent  "))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype = 'int8': accepted: ('auto', 'fp8', "),
        ({"kv_cache_dtype": "fp8", "kv_cache_group_size": 0}, "accepted: a whole number from 1"),
        ({"kv_cache_dtype": "fp8", "kv_cache_group_size": "all"}, "kv_cache_group_size = 'all'"),
        ({"kv_cache_dtype": "fp8", "kv_cache_scale_fmt": "e5m2"}, "kv_cache_scale_fmt = 'e5m2'"),
        ({"kv_cache_group_size": 64}, "is for an fp8 cache: set kv_cache_dtype too"),
        ({"kv_cache_scale_fmt": "ue8m0"}, "is for an fp8 cache: set kv_cache_dtype too"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**options)
    assert part in str(caught.value)


@pytest.mark.parametrize("group", ["auto", "token"])
def test_rows_that_rotate_throughout_are_refused(group: Any, tiny: Tiny) -> None:
    """They stay as computed: there is nothing to store in fp8."""
    model = tiny("deepseek_v4", keys={"head_dim": 14, "qk_rope_head_dim": 14, "index_head_dim": 16})
    config = replace(BASE, kv_cache_dtype="fp8", kv_cache_group_size=group)
    with pytest.raises(UsageError, match=r"kv_cache_dtype = 'fp8'.*rotates.*accepted: 'auto'"):
        make_plan(read_model(model), config, find_device("cpu"))
