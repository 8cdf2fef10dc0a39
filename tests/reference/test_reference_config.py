"""How `reference/` reads config.json: every spelling, the published figures, what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf
from hf import Case, Checkpoints
from published import FP8, INT4
from trueline.errors import ConfigError
from trueline.reference import config as facts
from trueline.reference.config import Config

V2, V3 = Case("deepseek_v2"), Case("deepseek_v3")


def int4(**weights: Any) -> dict[str, Any]:
    group = INT4["config_groups"]["group_0"]
    changed = group | {"weights": group["weights"] | weights}
    return {"quantization_config": INT4 | {"config_groups": {"group_0": changed}}}


@pytest.mark.parametrize("name", hf.YARNS)
def test_yarn_has_the_bits_of_transformers(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **hf.YARNS[name]}
    theirs = transformers.DeepseekV3Config(rope_parameters=rope, max_position_embeddings=163840)
    theirs.save_pretrained(tmp_path)
    config = facts.read_config(tmp_path)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert torch.equal(facts.inverse_frequencies(config), inv_freq)
    assert facts.cos_sin_scale(config) == attention_factor


@pytest.mark.parametrize("case", hf.GRID, ids=str)
def test_rope_and_scale_equal_the_built_model(case: Case, checkpoints: Checkpoints) -> None:
    config = facts.read_config(checkpoints(case).path)
    built = checkpoints(case).model.float().model
    built = getattr(built, "language_model", built)
    assert torch.equal(facts.inverse_frequencies(config), built.rotary_emb.inv_freq)
    assert facts.cos_sin_scale(config) == built.rotary_emb.attention_scaling
    assert facts.softmax_scale(config) == pytest.approx(built.layers[0].self_attn.scaling)
    for layer, block in enumerate(built.layers):
        assert facts.layer_is_moe(config, layer) == hasattr(block.mlp, "experts")


def published(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config.json in the words of the model's authors."""
    raw = {key: raw[key] for key in raw if key not in ("head_dim", "qk_head_dim")}
    rope = raw.pop("rope_parameters")
    v2 = raw["model_type"] == "deepseek_v2"
    raw |= {"rope_theta": rope.pop("rope_theta"), "moe_layer_freq": 1}
    raw |= {"scoring_func": "softmax" if v2 else "sigmoid"}
    if v2:
        raw |= {"n_group": raw["n_group"] or 1, "topk_group": raw["topk_group"] or 1}
    else:
        raw |= {"topk_method": "noaux_tc"}
    kind = rope.pop("rope_type")
    return raw | {"rope_scaling": {"type": kind, **rope} if kind == "yarn" else None}


@pytest.mark.parametrize("case", hf.GRID, ids=str)
def test_published_spelling_reads_the_same(
    case: Case, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    raw = json.loads((checkpoints(case).path / "config.json").read_text())
    if case.family == "kimi_k25":
        raw["text_config"] = published(raw["text_config"]) | {"model_type": "kimi_k2"}
    else:
        raw = published(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = facts.read_config(checkpoints(case).path)
    if case.family == "kimi_k25":
        expected = replace(expected, family="kimi_k2")
    assert facts.read_config(tmp_path) == facts.read_config(tmp_path / "config.json") == expected


def write_config(path: Path, source: Path, **changes: Any) -> Config:
    shutil.copy(source / "config.json", path / "config.json")
    hf.edit_config(path, **changes)
    return facts.read_config(path)


def test_rope_switches(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints(V3).path
    full = facts.read_config(source)
    off = write_config(tmp_path, source, rope_parameters=hf.YARN | {"apply_yarn_scaling": False})
    assert facts.softmax_scale(off) == (off.qk_nope_head_dim + off.qk_rope_head_dim) ** -0.5
    assert facts.cos_sin_scale(off) == facts.cos_sin_scale(full)
    assert torch.equal(facts.inverse_frequencies(off), facts.inverse_frequencies(full))

    bare = {"rope_type": "yarn", "factor": 7.0, "rope_theta": 300.0}
    yarn = write_config(tmp_path, source, rope_parameters=bare).yarn
    assert yarn is not None
    assert (yarn.beta_fast, yarn.beta_slow, yarn.original_max_position_embeddings) == (32, 1, 168)

    # the legacy dict replaces the new one, and brings its own base or takes the top-level one
    legacy = {"type": "yarn", "factor": 3.0}
    both = write_config(tmp_path, source, rope_scaling=legacy, rope_theta=77.0)
    assert (both.rope_theta, both.yarn and both.yarn.factor) == (77.0, 3.0)
    partial = hf.YARN | {"partial_rotary_factor": 0.5}
    halved = write_config(tmp_path, source, rope_parameters=partial)
    assert facts.inverse_frequencies(halved).shape == (hf.R // 2,)


def test_tied_embeddings_of_kimi_k25(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints(Case("kimi_k25")).path
    text = json.loads((source / "config.json").read_text())["text_config"]
    untied = {key: text[key] for key in text if key != "tie_word_embeddings"}

    def tied(top: bool | None, nested: dict[str, Any]) -> bool:
        config = write_config(tmp_path, source, tie_word_embeddings=top, text_config=nested)
        return config.tie_word_embeddings

    assert tied(True, text | {"tie_word_embeddings": False})
    assert not tied(False, text | {"tie_word_embeddings": True})
    assert tied(None, text | {"tie_word_embeddings": True})
    assert not tied(None, untied)


def test_which_layers_are_moe(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def moe(source: Path, **changes: Any) -> list[bool]:
        config = write_config(tmp_path, source, **changes)
        return [facts.layer_is_moe(config, layer) for layer in range(hf.LAYERS)]

    source = checkpoints(V3).path
    assert moe(source) == [False, True, True, True]
    assert moe(source, first_k_dense_replace=2) == [False, False, True, True]
    assert moe(source, first_k_dense_replace=0, moe_layer_freq=2) == [True, False, True, False]
    glm = checkpoints(Case("glm4_moe_lite")).path
    assert moe(glm, first_k_dense_replace=3) == [True, False, True, True]
    assert moe(glm, mlp_layer_types=None) == [False, True, True, True]
    assert moe(glm, mlp_layer_types=None, first_k_dense_replace=2) == [False, False, True, True]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": INT4 | {"format": "int-quantized"}}, "int-quantized"),
        (int4(symmetric=False), "'symmetric': False"),
        (int4(num_bits=8), "'num_bits': 8"),
        (int4(actorder="group"), "'actorder': 'group'"),
        ({"quantization_config": FP8 | {"expert_dtype": "fp6"}}, "fp6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused(
    change: dict[str, Any], named: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        write_config(tmp_path, checkpoints(V3).path, **change)
