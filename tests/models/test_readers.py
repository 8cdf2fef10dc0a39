"""Family readers: every spelling means the same, everything unknown is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import published
from trueline.errors import ConfigError
from trueline.models import FAMILIES, read_model
from trueline.models.harmless import HARMLESS, INERT_AT
from trueline.spec.feedforward import DenseSpec
from trueline.spec.fields import Fields
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec
from trueline.weights.formats import quantised_formats
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.fp4 import Fp4Experts
from trueline.weights.formats.pack_int4 import PackInt4

WriteConfig = Callable[[dict[str, Any]], Path]
V3, YARN = published.V3, published.V3["rope_scaling"]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def refusal(config: dict[str, Any], write_config: WriteConfig, **facts: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_model(write_config(config), facts)
    return str(caught.value)


def mla(spec: ModelSpec) -> MLASpec:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, MLASpec)
    return mixer


# -- spellings -------------------------------------------------------------------------

SPELLINGS = {
    "rope_scaling and rope_theta": V3,
    "rope_type": V3 | {"rope_scaling": without(YARN, "type") | {"rope_type": "yarn"}},
    "both types": V3 | {"rope_scaling": YARN | {"rope_type": "yarn"}},
    "rope_parameters": without(V3, "rope_scaling", "rope_theta")
    | {"rope_parameters": without(YARN, "type") | {"rope_type": "yarn", "rope_theta": 10000.0}},
    "rope_parameters, theta outside": without(V3, "rope_scaling") | {"rope_parameters": YARN},
    "theta twice": without(V3, "rope_scaling")
    | {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "theta inside rope_scaling": without(V3, "rope_theta")
    | {"rope_scaling": YARN | {"rope_theta": 10000}},
    "both dicts alike": V3 | {"rope_parameters": YARN},
    "null beside": V3 | {"rope_parameters": None},
    "no rope_interleave": without(V3, "rope_interleave"),
    "rope_interleave true": V3 | {"rope_interleave": True},
    "partial_rotary_factor 1": V3 | {"partial_rotary_factor": 1.0},
    "saved by transformers": without(V3, "scoring_func", "topk_method", "moe_layer_freq")
    | {"head_dim": 64, "qk_head_dim": 192},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_gives_the_same_model(name: str, write_config: WriteConfig) -> None:
    assert read_model(write_config(SPELLINGS[name])) == read_model(write_config(V3))


def test_dtype_and_mtp_have_two_spellings(write_config: WriteConfig) -> None:
    other = without(V3, "torch_dtype", "num_nextn_predict_layers")
    other |= {"dtype": "bfloat16", "num_mtp_layers": 1}
    assert read_model(write_config(other)) == read_model(write_config(V3))


def test_default_rope(write_config: WriteConfig) -> None:
    none = mla(read_model(write_config(V3 | {"rope_scaling": None})))
    default = without(V3, "rope_scaling") | {"rope_parameters": {"rope_type": "default"}}
    assert none.rope == mla(read_model(write_config(default))).rope
    assert none.rope.yarn is None
    assert (none.rope.cos_sin_scale, none.rope.score_scale) == (1.0, 1.0)


def test_yarn_switches(write_config: WriteConfig) -> None:
    def rope(**keys: Any) -> Any:
        return mla(read_model(write_config(V3 | {"rope_scaling": YARN | keys}))).rope

    plain = rope()
    off = rope(apply_yarn_scaling=False)
    assert off.score_scale == 1.0
    assert off.cos_sin_scale == plain.cos_sin_scale
    assert rope(attention_factor=0.5).cos_sin_scale == 0.5
    assert rope(attention_factor=0.5).score_scale == plain.score_scale
    assert rope(mscale_all_dim=0).score_scale == 1.0
    assert rope(mscale_all_dim=0).cos_sin_scale == pytest.approx(1.368888)
    assert rope(factor=1).score_scale == 1.0
    original = mla(
        read_model(
            write_config(V3 | {"rope_scaling": without(YARN, "original_max_position_embeddings")})
        )
    ).rope.yarn
    assert original is not None
    assert original.original_max_position == V3["max_position_embeddings"]
    assert original.sources["original_max_position"].kind == "default"


def test_half_split(write_config: WriteConfig) -> None:
    spec = read_model(write_config(V3 | {"rope_interleave": False}))
    assert mla(spec).rope.pairing == "half-split"


def test_layer_kinds(write_config: WriteConfig) -> None:
    def dense(config: dict[str, Any]) -> list[int]:
        layers = read_model(write_config(config)).layers
        return [layer.index for layer in layers if isinstance(layer.feed_forward, DenseSpec)]

    assert dense(V3) == [0, 1, 2]
    assert dense(V3 | {"first_k_dense_replace": 0}) == []
    assert dense(V3 | {"first_k_dense_replace": 61}) == list(range(61))
    assert dense(V3 | {"n_routed_experts": None}) == list(range(61))
    every_second = dense(V3 | {"moe_layer_freq": 2})
    assert every_second == [0, 1, 2, *range(3, 61, 2)]
    glm = published.GLM_4_7_FLASH
    assert dense(without(glm, "first_k_dense_replace")) == [0]
    listed = glm | {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}
    assert dense(listed) == [46]


def test_shared_experts_may_be_absent(write_config: WriteConfig) -> None:
    for nothing in (None, 0):
        spec = read_model(write_config(V3 | {"n_shared_experts": nothing}))
        assert getattr(spec.layers[-1].feed_forward, "shared_width", "unset") is None


def test_latent_norm_eps_is_a_fact_with_an_override(write_config: WriteConfig) -> None:
    file = write_config(published.GLM_4_7_FLASH)
    assert mla(read_model(file)).latent_norm_eps == 1e-6
    assert mla(read_model(file)).sources["latent_norm_eps"].kind == "default"
    changed = mla(read_model(file, {"latent_norm_eps": 1e-5}))
    assert changed.latent_norm_eps == 1e-5
    assert changed.sources["latent_norm_eps"].kind == "override"
    assert replace(changed, latent_norm_eps=1e-6) == mla(read_model(file))


def test_block_fp8(write_config: WriteConfig) -> None:
    storage = read_model(write_config(V3)).storage
    assert isinstance(storage, BlockFp8)
    assert storage.block == (128, 128)
    assert not storage.power_of_two_scales
    quant = published.FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    storage = read_model(write_config(V3 | {"quantization_config": quant})).storage
    assert isinstance(storage, BlockFp8)
    assert storage.power_of_two_scales
    assert storage.ignored_modules == ("lm_head",)


K2_INT4 = published.K2 | {"quantization_config": published.INT4}


def int4(**weights: Any) -> dict[str, Any]:
    """K2 in int4, with some keys of its weights' section changed."""
    group = published.INT4["config_groups"]["group_0"]
    changed = group | {"weights": group["weights"] | weights}
    return int4_section(config_groups={"group_0": changed})


def int4_section(**keys: Any) -> dict[str, Any]:
    return K2_INT4 | {"quantization_config": published.INT4 | keys}


def int4_group(**keys: Any) -> dict[str, Any]:
    group = published.INT4["config_groups"]["group_0"]
    return int4_section(config_groups={"group_0": group | keys})


def test_pack_quantized_int4(write_config: WriteConfig) -> None:
    storage = read_model(write_config(K2_INT4)).storage
    assert isinstance(storage, PackInt4)
    assert storage.group == 32
    assert storage.sources["group"].text.endswith("config_groups.group_0.weights.group_size")
    assert storage.exempts("model.layers.0.mlp.up_proj.weight")
    assert storage.exempts("model.layers.3.self_attn.o_proj.weight")
    assert not storage.exempts("model.layers.3.mlp.experts.7.up_proj.weight")
    for config in (int4(group_size=128), int4(observer="mse", scale_dtype=None)):
        assert isinstance(read_model(write_config(config)).storage, PackInt4)
    newer = {"version": "0.20.0", "sparsity_config": {}, "transform_config": {}, "ignore": None}
    assert read_model(write_config(int4_section(**newer))).storage == PackInt4(
        group=32, ignored_modules=()
    )


def test_a_wrapper_states_int4_in_either_place(write_config: WriteConfig) -> None:
    k25 = published.K25
    inner = without(k25["text_config"], "quantization_config")
    storages = [
        read_model(write_config(config)).storage
        for config in (k25, without(k25, "quantization_config"), k25 | {"text_config": inner})
    ]
    assert isinstance(storages[0], PackInt4)
    assert storages[0] == storages[1] == storages[2]


@pytest.mark.parametrize("place", ["beside", "inside", "both"])
def test_fp4_experts(place: str, write_config: WriteConfig) -> None:
    """Our own combination: V4's experts in a V3."""
    inside = {"expert_dtype": "fp4"} if place != "beside" else {}
    config = V3 | {"quantization_config": published.FP8 | inside}
    if place != "inside":
        config |= {"expert_dtype": "fp4"}
    spec = read_model(write_config(config))
    storage = spec.storage
    assert isinstance(storage, Fp4Experts)
    assert spec.sources["storage"].text.endswith("expert_dtype")
    assert storage.format_of("model.layers.3.mlp.experts.7.up_proj.weight") is storage.routed
    assert storage.format_of("model.layers.3.mlp.shared_experts.up_proj.weight") is storage.others
    assert [fmt.label for fmt in quantised_formats(spec)] == ["fp4", "block fp8"]


def test_tied_embeddings_of_the_wrapper(write_config: WriteConfig) -> None:
    """transformers' wrapper class says true by default, its text model false: the file decides."""
    k25 = without(published.K25, "tie_word_embeddings")
    assert not read_model(write_config(k25)).tied_embeddings
    assert read_model(write_config(k25 | {"tie_word_embeddings": True})).tied_embeddings


# -- refusals --------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing key": (without(V3, "kv_lora_rank"), ["'kv_lora_rank' is missing", "an integer"]),
    "misspelt key": (
        without(V3, "kv_lora_rank") | {"kv_lora_rnk": 512},
        ["'kv_lora_rank' is missing", "nearest key in the file is 'kv_lora_rnk'"],
    ),
    "unread key": (
        V3 | {"index_topk_freq": 4},
        ["nobody reads 'index_topk_freq' = 4", "harmless"],
    ),
    "unread key, nearly right": (
        V3 | {"routed_scaling_factors": 2.0},
        ["'routed_scaling_factors'", "nearest known name is 'routed_scaling_factor'"],
    ),
    "unread yarn key": (
        V3 | {"rope_scaling": YARN | {"mscale_all_dims": 1.0}},
        ["'rope_scaling.mscale_all_dims'", "nearest known name is 'mscale_all_dim'"],
    ),
    "wrong type": (V3 | {"hidden_size": "7168"}, ["'hidden_size': found \"7168\"", "an integer"]),
    "bool for number": (V3 | {"n_shared_experts": True}, ["'n_shared_experts': found true"]),
    "float for count": (V3 | {"num_hidden_layers": 61.0}, ["found 61.0", "an integer"]),
    "out of range": (V3 | {"rms_norm_eps": 0}, ["'rms_norm_eps': found 0", "above 0"]),
    "too many layers": (V3 | {"num_hidden_layers": 10**9}, ["from 1 to 1024"]),
    "unknown rope type": (
        V3 | {"rope_scaling": YARN | {"type": "longrope"}},
        ["'rope_scaling.type': found \"longrope\"", '"default" or "yarn"'],
    ),
    "misspelt rope type": (
        V3 | {"rope_scaling": YARN | {"type": "yarm"}},
        ["nearest known name is 'yarn'"],
    ),
    "no rope type": (V3 | {"rope_scaling": without(YARN, "type")}, ["'rope_scaling.rope_type'"]),
    "two rope dicts": (
        V3 | {"rope_parameters": YARN | {"factor": 41}},
        ["'rope_scaling'", "the same as 'rope_parameters'"],
    ),
    "two bases": (
        V3 | {"rope_scaling": YARN | {"rope_theta": 5e4}},
        ["'rope_theta': found 10000", "50000.0"],
    ),
    "no base": (without(V3, "rope_theta"), ["'rope_theta' is missing"]),
    "half rotation": (
        V3 | {"partial_rotary_factor": 0.5},
        ["'partial_rotary_factor': found 0.5", "rotates all of qk_rope_head_dim"],
    ),
    "half rotation inside": (
        V3 | {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}},
        ["'rope_scaling.partial_rotary_factor'"],
    ),
    "odd rope dim": (V3 | {"qk_rope_head_dim": 63}, ["'qk_rope_head_dim'", "even"]),
    "wrong sum": (V3 | {"qk_head_dim": 576}, ["'qk_head_dim': found 576", "192"]),
    "grouped heads": (V3 | {"num_key_value_heads": 8}, ["'num_key_value_heads': found 8"]),
    "softmax in V3": (V3 | {"scoring_func": "softmax"}, ["'scoring_func'", '"sigmoid"']),
    "greedy in V3": (V3 | {"topk_method": "greedy"}, ["'topk_method'", '"noaux_tc"']),
    "sigmoid in V2": (published.V2 | {"scoring_func": "sigmoid"}, ["'scoring_func'", '"softmax"']),
    "V2 renormalised": (published.V2 | {"norm_topk_prob": True}, ["'norm_topk_prob'", "false"]),
    "V2 half-split": (published.V2 | {"rope_interleave": False}, ["'rope_interleave'"]),
    "groups do not divide": (V3 | {"n_group": 7}, ["'n_group': found 7", "divisor"]),
    "groups of one": (V3 | {"n_group": 256, "topk_group": 8}, ["'n_group'", "groups of >= 2"]),
    "too many groups kept": (V3 | {"topk_group": 9}, ["'topk_group': found 9", "1 to 8"]),
    "more experts than groups hold": (
        V3 | {"num_experts_per_tok": 129},
        ["'num_experts_per_tok'", "1 to 128"],
    ),
    "bias": (V3 | {"attention_bias": True}, ["'attention_bias': found true", "biases"]),
    "activation": (V3 | {"hidden_act": "gelu"}, ["'hidden_act': found \"gelu\"", "silu"]),
    "pruned": (V3 | {"pruned_heads": {"0": [1]}}, ["'pruned_heads'"]),
    "layer types in V3": (V3 | {"mlp_layer_types": ["dense"] * 61}, ["'mlp_layer_types'"]),
    "too few layer types": (
        published.GLM_4_7_FLASH | {"mlp_layer_types": ["dense"]},
        ["'mlp_layer_types'", "a list of 47"],
    ),
    "architecture": (
        V3 | {"architectures": ["DeepseekV3ForSequenceClassification"]},
        ["'architectures'", "DeepseekV3ForCausalLM"],
    ),
    "two dtypes": (V3 | {"dtype": "float16"}, ["'torch_dtype'", "float16"]),
    "fp8 format": (
        V3 | {"quantization_config": published.FP8 | {"fmt": "e5m2"}},
        ["'quantization_config.fmt': found \"e5m2\""],
    ),
    "fp8 block": (
        V3 | {"quantization_config": published.FP8 | {"weight_block_size": [128]}},
        ["'quantization_config.weight_block_size'", "a list of 2"],
    ),
    "fp8 static": (
        V3 | {"quantization_config": published.FP8 | {"activation_scheme": "static"}},
        ["'quantization_config.activation_scheme'"],
    ),
    "bad expression": (
        V3 | {"quantization_config": published.FP8 | {"ignore": ["re:("]}},
        ["'quantization_config.ignore'", "regular expression"],
    ),
    "int4 format": (int4_section(format="int-quantized"), ['found "int-quantized"', "pack-"]),
    "int4 status": (int4_section(quantization_status="frozen"), ["'quantization_config.quanti"]),
    "int4 cache": (int4_section(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme", "null"]),
    "int4 sparse": (int4_section(sparsity_config={"format": "dense"}), ["sparsity_config"]),
    "int4 no group": (int4_section(config_groups={}), ["config_groups'", "one group"]),
    "int4 two groups": (
        int4_section(config_groups=published.INT4["config_groups"] | {"group_1": {}}),
        ["config_groups'", "one group"],
    ),
    "int4 unknown key": (int4_section(surprise=1), ["nobody reads 'quantization_config.surprise'"]),
    "int4 targets": (int4_group(targets=["Linear", "Conv1d"]), ["group_0.targets", '"Linear"']),
    "int4 one target": (int4_group(targets=["re:.*down_proj"]), ["group_0.targets"]),
    "int4 inputs": (int4_group(input_activations={"num_bits": 8}), ["input_activations", "null"]),
    "int4 outputs": (int4_group(output_activations={}), ["output_activations", "null"]),
    "int4 no weights": (int4_group(weights=None), ["group_0.weights'"]),
    "int4 group format": (int4_group(format="nvfp4-pack-quantized"), ["group_0.format"]),
    "int4 bits": (int4(num_bits=8), ["weights.num_bits': found 8", "4 to 4"]),
    "int4 type": (int4(type="float"), ['weights.type\': found "float"', '"int"']),
    "int4 strategy": (int4(strategy="channel"), ["weights.strategy'", '"group"']),
    "int4 zero points": (int4(symmetric=False), ["weights.symmetric': found false", "true"]),
    "int4 order": (int4(actorder="group"), ['weights.actorder\': found "group"', "null"]),
    "int4 dynamic": (int4(dynamic=True), ["weights.dynamic': found true", "false"]),
    "int4 group size": (int4(group_size=36), ["weights.group_size': found 36", "multiple of 8"]),
    "int4 channels": (int4(group_size=-1), ["weights.group_size': found -1"]),
    "int4 unknown weights key": (int4(zero=0), ["nobody reads", "weights.zero"]),
    "int4 experts": (K2_INT4 | {"expert_dtype": "fp4"}, ["nobody reads 'expert_dtype'"]),
    "two expert dtypes": (
        V3
        | {"expert_dtype": "fp8"}
        | {"quantization_config": published.FP8 | {"expert_dtype": "fp4"}},
        ["'quantization_config.expert_dtype'", '"fp8"'],
    ),
    "expert dtype": (V3 | {"expert_dtype": "fp6"}, ["'expert_dtype': found \"fp6\"", '"fp4"']),
    "plain experts": (
        without(V3, "quantization_config") | {"expert_dtype": "fp4"},
        ["nobody reads 'expert_dtype'"],
    ),
    "no text model": (without(published.K25, "text_config"), ["'text_config' is missing"]),
    "other text model": (
        published.K25 | {"text_config": published.K25["text_config"] | {"model_type": "llama"}},
        ["'text_config.model_type': found \"llama\""],
    ),
    "model type": (V3 | {"model_type": "deepseek_v33"}, ["'model_type'", "deepseek_v3"]),
    "no model type": (without(V3, "model_type"), ["'model_type': found None", "kimi_k2"]),
    "V4 ratio": (
        published.V4_FLASH | {"compress_ratios": [0, 8]},
        ["'compress_ratios'", "[0, 4, 128]"],
    ),
    "V4 mscale": (
        published.V4_FLASH
        | {"rope_scaling": published.V4_FLASH["rope_scaling"] | {"attention_factor": 1.3}},
        ["'rope_scaling.attention_factor'", "no magnitude"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, write_config: WriteConfig) -> None:
    config, parts = REFUSED[name]
    message = refusal(config, write_config)
    assert "config.json" in message
    for part in parts:
        assert part in message, message


def test_bad_overrides(write_config: WriteConfig) -> None:
    assert "latent_norm_eps" in refusal(V3, write_config, latent_norm_ep=1e-5)
    assert "(0, 0.1]" in refusal(V3, write_config, latent_norm_eps=-1.0)
    assert "no meaning for deepseek_v4" in refusal(
        published.V4_FLASH, write_config, latent_norm_eps=1e-5
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not readable as JSON"),
        ("{", "not readable as JSON"),
        ("[]", "a JSON object is accepted"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"a": 1, "a": 1}', "'a' stands twice"),
        ('{"a": null, "b": {"c": 1, "c": 1}}', "'c' stands twice"),
        ('{"rms_norm_eps": NaN}', "NaN is not JSON"),
        ("\xff", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
    ],
)
def test_bad_json(text: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=part):
        read_model(file)


@pytest.mark.parametrize(("found", "wanted"), [(1, True), (0, False), (True, 1), (False, 0)])
def test_true_is_not_one(found: object, wanted: object) -> None:
    """Neither where a key may have one value, nor where two spellings must agree."""
    fields = Fields({"a": found, "b": wanted}, Path("config.json"))
    fields.must_equal("b", wanted, "the same")
    with pytest.raises(ConfigError, match="'a': found"):
        fields.must_equal("a", wanted, "another kind")
    read = fields.boolean if isinstance(wanted, bool) else fields.integer
    with pytest.raises(ConfigError, match="'a': found"):
        read("b", aliases=("a",))


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_model(tmp_path)


# -- the list of harmless keys ---------------------------------------------------------


def test_harmless_keys_have_reasons() -> None:
    assert all(reason for reason in HARMLESS.values())
    assert not HARMLESS.keys() & INERT_AT.keys()


@pytest.mark.parametrize("name", published.ALL)
def test_harmless_keys_change_nothing(name: str, write_config: WriteConfig) -> None:
    """No value of a harmless key changes a resolved fact."""
    config = copy.deepcopy(published.ALL[name])
    wanted = read_model(write_config(config))
    text = config.get("text_config", config)
    reads_head_dim = name in ("V4-Flash", "Ling-2.6-flash")
    for key in HARMLESS.keys() - ({"head_dim"} if reads_head_dim else set()):
        text[key] = [{"odd": [-7, "value"]}]
    assert read_model(write_config(config)) == wanted


def test_every_family_is_tested() -> None:
    assert {config["model_type"] for config in published.ALL.values()} == set(FAMILIES)


def test_specs_are_values(write_config: WriteConfig) -> None:
    one, two = (read_model(write_config(V3)) for _ in range(2))
    assert one == two
    assert one is not two
    with pytest.raises(AttributeError):
        one.layers[0].mixer.kv_lora_rank = 1  # type: ignore[misc, union-attr]
    assert json.dumps([name for name, _, _ in one.facts()])
