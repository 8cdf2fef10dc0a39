"""config.json of each built-in model: published keys, small dims."""

from __future__ import annotations

from trueline.utils.json_types import JSON

_COMMON: JSON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "kv_lora_rank": 128,
    "max_position_embeddings": 10240,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 64,
    "vocab_size": 1536,
}
_ROUTED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
}
_UNGROUPED = {**_ROUTED, "n_group": 1, "topk_group": 1}
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}
_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 0,
    **_ROUTED,
    "rope_scaling": _YARN,
}
# The text model alone; small, so that transformers, which makes one up, loads fast.
_NO_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
}
_INDEXER = {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 64}
# Rates and window are such that what is wrong costs accuracy. Beside a window of one token, entries
# of two in every layer are all that a token sees of those before it: the newest one a token late
# hides the token before in all layers. (With a window of 3 and entries of 4 tokens it cost three
# points: neighbours had passed it on.) Entries of 8 in half of the layers: slower learning.
# mscale would be 1.69. Plain YaRN of a length of 1,024, written so that factor × original length is
# the model's length.
_SPARSE, _ALL = "compressed_sparse_attention", "heavily_compressed_attention"
_V4: JSON = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    **{
        key: _COMMON[key]
        for key in (
            *("attention_bias", "attention_dropout", "bos_token_id", "eos_token_id"),
            *("pad_token_id", "hidden_act", "hidden_size", "initializer_range"),
            *("n_routed_experts", "n_shared_experts", "num_attention_heads", "num_hidden_layers"),
            *("q_lora_rank", "rms_norm_eps", "tie_word_embeddings", "torch_dtype", "use_cache"),
            "vocab_size",
        )
    },
    "head_dim": 128,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.25,
    "sliding_window": 1,
    "layer_types": [_ALL, _SPARSE, _ALL, _SPARSE, _ALL, _SPARSE],
    "compress_rates": {_SPARSE: 2, _ALL: 2},
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 64,
    "o_groups": 2,
    "o_lora_rank": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 6,
    "hc_eps": 1e-6,
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe", "moe"],
    "moe_intermediate_size": 88,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "swiglu_limit": 3.0,
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "main": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "partial_rotary_factor": 0.25,
            "factor": 1024.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 0.5,
            "beta_slow": 0.015625,
            "attention_factor": 1.0,
        },
    },
}
_NOT_LING = ("attention_bias", "moe_layer_freq", "n_routed_experts", "n_shared_experts")
_NOT_GLM = ("rope_theta",)


def _without(keys: tuple[str, ...]) -> JSON:
    return {key: value for key, value in _COMMON.items() if key not in keys}


CONFIGS: dict[str, JSON] = {
    "witness-v3": _COMMON | _V3,
    "witness-ling": _without(_NOT_LING)
    | _ROUTED
    | {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "group_norm_size": 2,
        "head_dim": 64,
        "partial_rotary_factor": 0.5,
        "layer_group_size": 4,
        "num_hidden_layers": 8,
        "linear_silu": False,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 64,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "rope_interleave": True,
        "rope_scaling": None,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
    },
    "witness-v32": _COMMON
    | _V3
    | _INDEXER
    | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "witness-glm5": _without(_NOT_GLM)
    | _UNGROUPED
    | _INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "head_dim": 32,
        # layers 2 and 4 of 6 see what 1 and 3 selected
        "index_skip_topk_offset": 2,
        "index_topk_freq": 2,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 4096,
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "witness-k25": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "media_placeholder_token_id": 2,
        "text_config": _COMMON
        | _V3
        | _UNGROUPED
        | {
            "model_type": "kimi_k2",
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "v_head_dim": 32,
            "rope_theta": 50000.0,
            "rope_scaling": {**_YARN, "factor": 64, "beta_fast": 1},
            "routed_scaling_factor": 2.827,
            "max_position_embeddings": 16384,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": _NO_VISION,
    },
    "witness-v4": _V4,
}
DENSE = {"witness-v32": "witness-v3"}
"""A sparse model begins with the weights of this dense one; GLM's is trained on the way."""
