"""Configurations for tiny models: published keys, dims unequal and prime-ish so that a swapped or
guessed dimension cannot go unnoticed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trueline.errors import UsageError, did_you_mean
from trueline.tiny.quantise import quantization_config
from trueline.tiny.tokenizer import SPECIALS
from trueline.utils.json_types import JSON
from trueline.weights.formats import Storage

_COMMON: JSON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": SPECIALS["<|begin|>"],
    "eos_token_id": SPECIALS["<|end|>"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 78,
    "initializer_range": 0.02,
    "intermediate_size": 83,
    "kv_lora_rank": 37,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 23,
    "moe_layer_freq": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_attention_heads": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "qk_nope_head_dim": 13,
    "qk_rope_head_dim": 10,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 11,
    "vocab_size": 311,
}
_DEEPSEEK_ONLY = ("attention_bias", "moe_layer_freq", "n_routed_experts", "n_shared_experts")
# What some families call a key.
_OWN_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}
_NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    # transformers' complex rotation of this family wants even strides
    "kv_lora_rank": 38,
    "qk_nope_head_dim": 14,
    "scoring_func": "softmax",
}
_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 0,
    **_NOAUX,
}
_K2 = {
    **_V3,
    "model_type": "kimi_k2",
    "q_lora_rank": 29,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": {**_YARN, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}

_SPARSE = {
    # fewer than 16 heads would give exact ties; 10 of the channels rotate
    "index_n_heads": 18,
    "index_head_dim": 32,
    "index_topk": 24,
    "q_lora_rank": 29,
}

_NOT_V4 = (
    "first_k_dense_replace",
    "intermediate_size",
    "kv_lora_rank",
    "moe_layer_freq",
    "qk_nope_head_dim",
    "v_head_dim",
)
_V4_YARN = {key: value for key, value in _YARN.items() if "mscale" not in key} | {"factor": 16}
# What transformers calls the layers of each ratio.
_LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}

FAMILIES: Mapping[str, JSON] = {
    "deepseek_v2": _COMMON
    | _V2
    | {
        "q_lora_rank": 29,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": _YARN,
    },
    "deepseek_v2_lite": _COMMON
    | _V2
    | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": _COMMON
    | _V3
    | {"q_lora_rank": 29, "n_group": 4, "topk_group": 2, "rope_scaling": _YARN},
    "kimi_k2": _COMMON | _K2,
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 0,
        "text_config": _COMMON | _K2,
        "tie_word_embeddings": False,
        "vision_config": {},
    },
    "glm4_moe_lite": _COMMON
    | _NOAUX
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 29,
        "qk_nope_head_dim": 11,
        "v_head_dim": 17,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "routed_scaling_factor": 1.8,
    },
    "deepseek_v32": _COMMON
    | _V3
    | _SPARSE
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": _YARN,
    },
    "glm_moe_dsa": {key: value for key, value in _COMMON.items() if key != "rope_theta"}
    | _NOAUX
    | _SPARSE
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "head_dim": 11,
        "index_head_dim": 48,
        # layers 2, 3 and 5 of 6 see what 1 and 4 selected
        "index_skip_topk_offset": 2,
        "index_topk_freq": 3,
        "indexer_rope_interleave": True,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "num_hidden_layers": 6,
        "num_nextn_predict_layers": 0,
        "qk_nope_head_dim": 11,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "topk_group": 1,
        "v_head_dim": 17,
    },
    "bailing_moe_v2_5": {key: value for key, value in _COMMON.items() if key not in _DEEPSEEK_ONLY}
    | {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        # 12 of 20 channels rotate, not the 10 of a latent key; a norm group is one and a half heads
        "group_norm_size": 4,
        "head_dim": 20,
        "partial_rotary_factor": 0.6,
        # latent layers at 2 and 5, and 6 behind the last whole group
        "layer_group_size": 3,
        "num_hidden_layers": 7,
        "intermediate_size": 88,
        "linear_silu": False,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 28,
        "n_group": 4,
        "norm_topk_prob": True,
        "num_experts": 12,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": 29,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": 600000.0,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": 2,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
    },
    "deepseek_v4": {key: value for key, value in _COMMON.items() if key not in _NOT_V4}
    | _NOAUX
    | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "compress_ratios": [0, 0, 4, 128, 4, 128],
        "compress_rope_theta": 160000.0,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 26,
        # fewer than 16 heads would give exact ties
        "index_head_dim": 14,
        "index_n_heads": 18,
        "index_topk": 5,
        # the last of them selects
        "num_hash_layers": 3,
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": 3,
        "o_lora_rank": 11,
        "q_lora_rank": 29,
        "rope_scaling": _V4_YARN,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 13,
        # low enough to clamp
        "swiglu_limit": 1.5,
    },
}


def family_config(family: str) -> JSON:
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES)
        raise UsageError(f"family '{family}': accepted: {', '.join(FAMILIES)}{hint}")
    config: JSON = json.loads(json.dumps(FAMILIES[family]))  # a deep copy
    return config


def own_name(text: JSON, key: str) -> str:
    """How this family writes a key."""
    name = _OWN_NAMES.get(key, key)
    return name if name in text else key


def change_config(
    config: JSON,
    keys: JSON,
    *,
    yarn: bool | None = None,
    storage: Storage | None = None,
) -> None:
    """Set keys of the text model; put YaRN in or take it out; declare how matrices are
    stored."""
    text = config.get("text_config", config)
    text.update({own_name(text, key): value for key, value in keys.items()})
    if "compress_ratios" in text:
        _extend_ratios(text)
    elif "num_attention_heads" in keys and "num_key_value_heads" in text:
        text["num_key_value_heads"] = keys["num_attention_heads"]
    if "torch_dtype" in keys:
        text.pop("dtype", None)
    if yarn is not None:
        rope = text.pop("rope_parameters", None) or {}
        text.setdefault("rope_theta", rope.get("rope_theta", _COMMON["rope_theta"]))
        yarn_keys = _V4_YARN if "compress_rope_theta" in text else _YARN
        text["rope_scaling"] = yarn_keys if yarn else None
    if storage is not None:
        config["quantization_config"] = quantization_config(storage)


def _extend_ratios(config: JSON) -> None:
    """Both compressed forms in turn, as published."""
    ratios = config["compress_ratios"]
    while len(ratios) < config["num_hidden_layers"]:
        ratios.append(128 if ratios[-1] == 4 else 4)


def as_saved(config: JSON, sparse_ratio: int = 4, all_ratio: int = 128) -> JSON:
    """A DeepSeek-V4 config in the form in which transformers saves it, where compression may have
    other ratios than the published ones."""
    if config.get("model_type") != "deepseek_v4" or "compress_ratios" not in config:
        raise UsageError("compression ratios: only a deepseek_v4 config with compress_ratios")
    flat = ("compress_ratios", "num_hash_layers", "rope_scaling")
    saved = {key: value for key, value in config.items() if key not in flat}
    count, hashed = config["num_hidden_layers"], config["num_hash_layers"]
    share = {"partial_rotary_factor": config["qk_rope_head_dim"] / config["head_dim"]}
    scaled = dict(config.get("rope_scaling") or {"type": "default"})
    scaled["rope_type"] = scaled.pop("type")
    if scaled["rope_type"] == "yarn":
        scaled["attention_factor"] = 1.0
    return saved | {
        "compress_rates": {_LAYER_TYPES[4]: sparse_ratio, _LAYER_TYPES[128]: all_ratio},
        "layer_types": [_LAYER_TYPES[ratio] for ratio in config["compress_ratios"][:count]],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (count - hashed),
        **share,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": config["rope_theta"], **share},
            "compress": scaled | {"rope_theta": config["compress_rope_theta"], **share},
        },
    }


def without_indexer(config: JSON) -> JSON:
    """The same DeepSeek-V3.2 model with attention over all keys: that is a DeepSeek-V3."""
    if config.get("model_type") != "deepseek_v32":
        raise UsageError("only deepseek_v32 has a dense counterpart (deepseek_v3)")
    kept = {key: value for key, value in config.items() if not key.startswith("index")}
    return kept | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
