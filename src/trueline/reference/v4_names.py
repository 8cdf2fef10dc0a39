"""DeepSeek V4's tensors: published names, and those that transformers writes, as one set of names;
and which of them a model has."""

import re
from collections.abc import Iterator

from trueline.reference.config import Config
from trueline.reference.v4_facts import SPARSE, WINDOW

# transformers saves its own names, or published ones, of which it gets some wrong: `attn.norm`
RENAMED = (
    (r"^model\.", ""),
    (r"^embed(_tokens)?\.", "model.embed_tokens."),
    (r"^(lm_)?head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head[._](hc_)?", "model.hc_head."),
    (r"^layers\.", "model.layers."),
    (r"\.hc_(attn|ffn)_", r".hc_\1."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.q_b_proj."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.self_attn\.norm\.", ".self_attn.kv_norm."),
    (r"\.q(_a)?_norm\.", ".q_a_layernorm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.w(q_a|q_b|o_a|o_b|kv|gate)\.", r".\1_proj."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
)
DRAFTS = re.compile(r"mtp\.")  # drafting is no part of the definition
# Kept in float32 at least: stored so, and used so.
PRECISE = re.compile(r".*\.(sinks|position_bias|hc_(attn|ffn|head)\.\w+)")


def renamed(name: str) -> str:
    for pattern, ours in RENAMED:
        name = re.sub(pattern, ours, name)
    return name


def names(config: Config) -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    yield from (f"model.hc_head.{part}" for part in ("fn", "base", "scale"))
    for layer in range(config.num_hidden_layers):
        yield from (f"model.layers.{layer}.{name}" for name in layer_names(config, layer))


def layer_names(config: Config, layer: int) -> Iterator[str]:
    facts = config.v4_facts
    yield from ("input_layernorm.weight", "post_attention_layernorm.weight")
    yield from (f"hc_{of}.{part}" for of in ("attn", "ffn") for part in ("fn", "base", "scale"))
    latent = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj")
    yield from ("self_attn.sinks", *(f"self_attn.{module}.weight" for module in latent))
    if facts.forms[layer] != WINDOW:
        yield from compressor_names("self_attn.compressor")
    if facts.forms[layer] == SPARSE:
        yield from (f"self_attn.indexer.{part}.weight" for part in ("q_b_proj", "weights_proj"))
        yield from compressor_names("self_attn.indexer.compressor")
    choice = "tid2eid" if facts.hashed[layer] else "e_score_correction_bias"
    yield from ("mlp.gate.weight", f"mlp.gate.{choice}")
    experts = (f"experts.{expert}" for expert in range(config.n_routed_experts or 0))
    for at in ("shared_experts", *experts):
        yield from (f"mlp.{at}.{part}_proj.weight" for part in ("gate", "up", "down"))


def compressor_names(at: str) -> Iterator[str]:
    yield f"{at}.position_bias"
    yield from (f"{at}.{module}.weight" for module in ("kv_proj", "gate_proj", "norm"))
