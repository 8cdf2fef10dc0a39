"""How `reference/` reads DeepSeek V4's config.json: both forms, the published schedules, what it
refuses. Nothing may come from a default."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from published import V4_FLASH
from trueline.errors import ConfigError
from trueline.reference import config as facts
from trueline.reference.v4_facts import ALL, SPARSE, WINDOW

WriteConfig = Callable[[Mapping[str, Any]], Path]

PRO = V4_FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
BASE = V4_FLASH | {"expert_dtype": "fp8"}
OTHER_RATES = {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers saves it, without what it keeps of the flat form."""
    saved = json.loads(transformers.DeepseekV4Config(**deepcopy(flat)).to_json_string())
    assert not {"compress_ratios", "num_hash_layers", "rope_scaling"} & saved.keys()
    del saved["qk_rope_head_dim"], saved["rope_theta"], saved["compress_rope_theta"]
    return dict(saved)


NESTED = nested(V4_FLASH)


def changed(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """None removes a key."""
    merged = {**config, **changes}
    return {key: merged[key] for key in merged if merged[key] is not None}


def compress(**changes: Any) -> dict[str, Any]:
    ropes = NESTED["rope_parameters"]
    return changed(
        NESTED, rope_parameters=ropes | {"compress": changed(ropes["compress"], **changes)}
    )


@pytest.mark.parametrize("flat", [V4_FLASH, PRO, BASE], ids=["Flash", "Pro", "Base"])
def test_both_forms_say_the_same(flat: Mapping[str, Any], write_config: WriteConfig) -> None:
    config = facts.read_config(write_config(flat))
    assert facts.read_config(write_config(nested(flat))) == config
    v4 = config.v4_facts
    for name in ("index_topk", "o_groups", "o_lora_rank", "hc_sinkhorn_iters", "swiglu_limit"):
        assert getattr(v4, name) == flat[name]
    assert config.quantised.fp4_experts == (flat["expert_dtype"] == "fp4")
    assert config.quantised.plain_scale_names


def test_published_schedules(write_config: WriteConfig) -> None:
    flash = facts.read_config(write_config(V4_FLASH)).v4_facts
    assert flash.forms == (WINDOW, WINDOW, *[SPARSE, ALL] * 20, SPARSE)
    assert flash.ratios == (0, 0, *[4, 128] * 20, 4)
    assert flash.hashed == (True,) * 3 + (False,) * 40
    pro = facts.read_config(write_config(PRO)).v4_facts
    assert [pro.forms.count(form) for form in (WINDOW, SPARSE, ALL)] == [0, 30, 31]
    assert pro.forms[:3] == (ALL, ALL, SPARSE)


def test_names_say_the_form_and_rates_the_ratio(write_config: WriteConfig) -> None:
    v4 = facts.read_config(write_config(changed(NESTED, compress_rates=OTHER_RATES))).v4_facts
    assert v4.forms[:4] == (WINDOW, WINDOW, SPARSE, ALL)
    assert v4.ratios[:4] == (0, 0, 3, 5)
    both = changed(NESTED, compress_ratios=[128] * 44)  # names win, as in transformers
    assert facts.read_config(write_config(both)).v4_facts.forms[2] == SPARSE
    mixed = changed(NESTED, mlp_layer_types=["moe", "hash_moe"] + ["moe"] * 41)
    assert facts.read_config(write_config(mixed)).v4_facts.hashed[:3] == (False, True, False)


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_rope_has_the_bits_of_transformers(form: str) -> None:
    raw = V4_FLASH if form == "flat" else NESTED
    rotary = DeepseekV4RotaryEmbedding(transformers.DeepseekV4Config(**deepcopy(V4_FLASH)))
    for layer, kind in enumerate(["main", "main", "compress", "compress"]):
        inv_freq, cos_sin_scale, softmax_scale = facts.v4_layer_rope(raw, layer)
        assert torch.equal(inv_freq, getattr(rotary, f"{kind}_inv_freq"))
        assert cos_sin_scale == getattr(rotary, f"{kind}_attention_scaling") == 1.0
        assert softmax_scale == pytest.approx(0.0441942, rel=1e-6)
    compressed = facts.v4_layer_rope(raw, 2)[0]
    published_values = (2.265625e-3, 2.969778e-4, 5.680529e-7)
    assert [compressed[i].item() for i in (16, 20, 31)] == pytest.approx(published_values, rel=1e-5)
    rope = {**V4_FLASH["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0}
    with_mscale = facts.v4_layer_rope({**V4_FLASH, "rope_scaling": rope}, 2)
    assert torch.equal(with_mscale[0], compressed)
    assert with_mscale[1:] == (1.0, 512**-0.5)


REQUIRED = (
    *("head_dim", "sliding_window", "o_groups", "o_lora_rank", "swiglu_limit", "index_n_heads"),
    *("index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "hidden_size"),
    *("num_hidden_layers", "num_attention_heads", "q_lora_rank", "rms_norm_eps", "vocab_size"),
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"),
)
FLAT_REQUIRED = (
    *("compress_ratios", "num_hash_layers", "rope_theta", "compress_rope_theta"),
    "qk_rope_head_dim",
)


@pytest.mark.parametrize("key", [*REQUIRED, *FLAT_REQUIRED])
def test_nothing_has_a_default(key: str, write_config: WriteConfig) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        facts.read_config(write_config(changed(V4_FLASH, **{key: None})))
    if key in REQUIRED:
        with pytest.raises(ConfigError, match=f"'{key}'"):
            facts.read_config(write_config(changed(NESTED, **{key: None})))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rates": (changed(NESTED, compress_rates=None), "compress_rates"),
    "one rate": (
        changed(NESTED, compress_rates={"compressed_sparse_attention": 4}),
        "heavily_compressed_attention",
    ),
    "compress theta": (compress(rope_theta=None), "rope_theta"),
    "magnitude": (compress(attention_factor=1.2772588722239782), "attention_factor"),
    "yarn in the window": (
        changed(
            NESTED,
            rope_parameters=NESTED["rope_parameters"]
            | {"main": NESTED["rope_parameters"]["compress"]},
        ),
        "window layers",
    ),
    "ratio": (changed(V4_FLASH, compress_ratios=[8] * 44), "compress_ratios has 8"),
    "too few ratios": (changed(V4_FLASH, compress_ratios=[4] * 42), "42 attention kinds"),
    "layer type": (changed(NESTED, layer_types=["full_attention"] * 43), "full_attention"),
    "too many types": (changed(NESTED, layer_types=["sliding_attention"] * 44), "44 attention"),
    "mlp type": (changed(NESTED, mlp_layer_types=["sparse"] * 43), "mlp_layer_types has 'sparse'"),
    "mlp types": (changed(NESTED, mlp_layer_types=["moe"] * 42), "42 feed-forward kinds"),
    "shared experts": (changed(V4_FLASH, n_shared_experts=2), "n_shared_experts=2"),
    "key-value heads": (changed(V4_FLASH, num_key_value_heads=8), "num_key_value_heads=8"),
    "plain weights": (changed(V4_FLASH, norm_topk_prob=False), "norm_topk_prob=False"),
    "scoring": (changed(V4_FLASH, scoring_func="sigmoid"), "scoring_func='sigmoid'"),
    "next family": (changed(V4_FLASH, model_type="deepseek_v41"), "deepseek_v41"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, write_config: WriteConfig) -> None:
    raw, named = REFUSED[name]
    with pytest.raises(ConfigError, match=named):
        facts.read_config(write_config(raw))
