"""DeepSeek-V4 models whose dims nobody chose: drawn configs in the form that transformers saves,
with any rates, windows, orders of layers, streams and groups, and sinks of both signs."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.utils.json_types import JSON

TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
VOCAB = 312
LONGEST = 1200
"""Positions. Blocks of entries may be as long as 144."""
HEAD_DIMS = ((4, 2), (7, 6), (10, 4), (13, 2), (19, 10), (23, 8), (26, 26), (31, 12))
"""With rotated channels: pairs whose share transformers turns back into the same number."""


def drawn_config(seed: int, *, ranks: int = 1) -> JSON:
    """Whatever is divided among ranks is a multiple of `ranks`."""
    draw = random.Random(seed)
    head_dim, rope = draw.choice(HEAD_DIMS)
    groups = ranks * draw.choice((1, 2, 3))
    layers = draw.randint(1, 6)
    allowed = draw.sample(TYPES, draw.randint(1, 3))
    experts = ranks * draw.choice((3, 5, 7))
    rates = {TYPES[1]: draw.randint(1, 9), TYPES[2]: draw.randint(1, 9)}
    theta, share = float(draw.randint(100, 20_000)), {"partial_rotary_factor": rope / head_dim}
    compress: JSON = {"rope_type": "default"}
    if draw.random() < 0.6:
        compress = {
            "rope_type": "yarn",
            "factor": draw.choice((2.5, 7.0, 16.0)),
            "original_max_position_embeddings": draw.choice((24, 61, 128)),
            "beta_fast": draw.choice((3.0, 32.0)),
            "beta_slow": draw.choice((0.5, 1.0)),
            "attention_factor": 1.0,
        }
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "hidden_size": ranks * draw.choice((33, 41, 58, 78)),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * draw.choice((1, 2, 5)),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "head_dim": head_dim,
        "qk_rope_head_dim": rope,
        "q_lora_rank": draw.choice((5, 17, 29)),
        "o_groups": groups,
        "o_lora_rank": draw.choice((3, 7, 11)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, 3),
        "n_shared_experts": 1,
        "moe_intermediate_size": ranks * draw.choice((5, 19, 23)),
        "routed_scaling_factor": draw.choice((0.7, 1.5, 2.5)),
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": draw.choice((0.6, 1.5, 10.0)),
        "sliding_window": draw.randint(1, 9),
        "index_n_heads": draw.choice((1, 3, 5, 17)),
        "index_head_dim": rope + draw.choice((0, 1, 6)),
        "index_topk": draw.randint(1, 12),
        "hc_mult": draw.randint(1, 5),
        "hc_sinkhorn_iters": draw.choice((1, 2, 3, 20)),
        "hc_eps": draw.choice((1e-6, 1e-3)),
        "rms_norm_eps": draw.choice((1e-6, 1e-4)),
        "tie_word_embeddings": draw.random() < 0.3,
        "layer_types": [draw.choice(allowed) for _ in range(layers)],
        "mlp_layer_types": [draw.choice(("hash_moe", "moe")) for _ in range(layers)],
        "compress_rates": rates,
        "max_position_embeddings": LONGEST,
        **share,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": theta, **share},
            "compress": compress | {"rope_theta": theta * draw.choice((0.5, 16.0)), **share},
        },
    }


def make_drawn(directory: Path, config: JSON, seed: int) -> None:
    """Sinks of both signs: some take nearly all of a softmax, some next to nothing."""
    make_checkpoint(directory, config, TinyOptions(seed=seed))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    for name, sinks in tensors.items():
        if name.endswith(".attn_sink"):
            sizes = torch.tensor([0.1, 1.0, 6.0, 40.0])
            of_head = sizes[torch.randint(len(sizes), sinks.shape, generator=generator)]
            tensors[name] = torch.randn(sinks.shape, generator=generator) * of_head
    save_file(tensors, file, metadata={"format": "pt"})
