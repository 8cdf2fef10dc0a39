"""A config of DeepSeek-V4 with rope as in the published ones: flat as they are, and nested as
transformers saves it."""

from __future__ import annotations

from trueline.utils.json_types import JSON

_FLAT_ONLY = ("compress_ratios", "num_hash_layers", "rope_scaling")

_YARN: JSON = {
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
V4 = {
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128, 0],
    "compress_rope_theta": 160000.0,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 96,
    "hidden_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": 8,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 8,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn"} | _YARN,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "vocab_size": 311,
}
# The same model, as transformers saves it.
V4_NESTED = {key: value for key, value in V4.items() if key not in _FLAT_ONLY} | {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "partial_rotary_factor": 0.25,
            "attention_factor": 1.0,
        }
        | _YARN,
    },
}
