"""What config.json means for the DeepSeek line and its relatives, read a second time on purpose.

The engine reads config.json in `models/` and `spec/`; this file shares nothing with it, so that a
wrong fact there shows up as a wrong number. Keys keep their published names.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.errors import ConfigError
from trueline.reference import bailing, dsa, v4_facts
from trueline.reference.quantised import Quantised, read_quantised
from trueline.reference.raw import Raw

# transformers builds q_a_layernorm and kv_a_layernorm without an eps, so `rms_norm_eps` never
# reaches them and they keep the class default (serving engines pass rms_norm_eps instead).
LATENT_NORM_EPS = 1e-6
SCORING = {"deepseek_v2": "softmax", v4_facts.FAMILY: "sqrtsoftplus"}  # the others: sigmoid


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None
    mscale: float
    mscale_all_dim: float
    apply_yarn_scaling: bool


@dataclass(frozen=True)
class Config:
    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    latent_norm_eps: float
    rope_theta: float
    rope_interleaved: bool  # channels (2i, 2i+1) together; else half-split: (i, i + R/2)
    yarn: Yarn | None
    tie_word_embeddings: bool

    first_k_dense_replace: int
    moe_layer_freq: int
    mlp_layer_types: list[str] | None
    n_routed_experts: int | None  # None: every layer is dense
    num_experts_per_tok: int
    n_shared_experts: int
    shared_expert_width: int  # of one of them
    scoring_func: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    quantised: Quantised
    linear: bailing.LinearFacts | None  # None: every layer is latent
    indexer: dsa.IndexerFacts | None  # None: a query sees every key before it
    norm_head: bool  # each column of lm_head at unit length
    v4: v4_facts.V4Facts | None

    @property
    def linear_facts(self) -> bailing.LinearFacts:
        assert self.linear is not None
        return self.linear

    @property
    def indexer_facts(self) -> dsa.IndexerFacts:
        assert self.indexer is not None
        return self.indexer

    @property
    def v4_facts(self) -> v4_facts.V4Facts:
        assert self.v4 is not None
        return self.v4


AS_WRITTEN = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps"),
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor", "first_k_dense_replace"),
)


def read_config(
    path: str | Path,
    latent_norm_eps: float = LATENT_NORM_EPS,
    linear_layer_factor: str = bailing.LAYER_FACTORS[0],
) -> Config:
    """Read a model directory or a config.json; the two facts on which published sources disagree
    may be stated."""
    path = Path(path)
    top = Raw(json.loads((path / "config.json" if path.is_dir() else path).read_text()))
    return config_of(top, latent_norm_eps, linear_layer_factor)


def config_of(top: Raw, latent_norm_eps: float, linear_layer_factor: str) -> Config:
    nested = top["model_type"] == "kimi_k25"
    raw = Raw(top["text_config"]) if nested else top
    if raw["model_type"] == "bailing_hybrid":
        raw = bailing.in_deepseek_words(raw)
    family = raw["model_type"]
    v4 = None
    if family == v4_facts.FAMILY:
        v4, raw = v4_facts.read_facts(raw), v4_facts.in_deepseek_words(raw)
        latent_norm_eps = raw["rms_norm_eps"]  # one eps for every norm
    others = (
        *("deepseek_v2", "glm4_moe_lite", "bailing_moe_v2_5"),
        *(*dsa.FAMILIES, v4_facts.FAMILY),
    )
    families = ("kimi_k2", "deepseek_v3", *(() if nested else others))
    if family not in families:
        raise ConfigError(f"config.json: model_type '{family}'; the reference has {families}")
    v2 = family == "deepseek_v2"
    scoring = SCORING.get(family, "sigmoid")
    refuse_what_is_not_computed(raw, v2, scoring)

    rope = rope_section(raw)
    # V2's "greedy" looks at no groups: n_group is null in the file, or 1 and unused
    grouped = not v2 or raw["topk_method"] == "group_limited_greedy"
    if family == "glm4_moe_lite":
        raw.setdefault("first_k_dense_replace", 1)  # transformers writes mlp_layer_types instead
    if family in dsa.FAMILIES and raw.get("mlp_layer_types"):
        raw.setdefault("first_k_dense_replace", 0)  # nobody looks
    return Config(
        **{key: raw[key] for key in AS_WRITTEN},
        family=family,
        latent_norm_eps=latent_norm_eps,
        rope_theta=rope.get("rope_theta") or raw["rope_theta"],
        rope_interleaved=v2 or raw.get("rope_interleave") is not False,
        yarn=read_yarn(rope, raw),
        tie_word_embeddings=top.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)),
        moe_layer_freq=raw.get("moe_layer_freq", 1),
        mlp_layer_types=raw.get("mlp_layer_types"),
        n_shared_experts=raw["n_shared_experts"] or 0,
        shared_expert_width=raw.get("shared_expert_width") or raw.get("moe_intermediate_size", 0),
        scoring_func=scoring,
        n_group=raw["n_group"] if grouped else 1,
        topk_group=raw["topk_group"] if grouped else 1,
        norm_topk_prob=not v2 and raw["norm_topk_prob"],
        quantised=read_quantised(raw, top),
        linear=bailing.read_linear(raw, rope, linear_layer_factor)
        if family == "bailing_moe_v2_5"
        else None,
        indexer=dsa.read_indexer(raw),
        norm_head=raw.get("norm_head", False),
        v4=v4,
    )


def refuse_what_is_not_computed(raw: Raw, v2: bool, scoring: str) -> None:
    accepted = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "scoring_func": (scoring,),
        "topk_method": ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",),
        # transformers' V2 ignores true, the authors' code renormalises and then drops the scaling
        "norm_topk_prob": (False,) if v2 else (True, False),
    }
    for key, values in accepted.items():
        if raw.get(key, values[0]) not in values:
            raise ConfigError(f"config.json: {key}={raw[key]!r}; the reference computes {values}")


def layer_is_moe(config: Config, layer: int) -> bool:
    if config.mlp_layer_types is not None:
        return config.mlp_layer_types[layer] == "sparse"
    dense = layer < config.first_k_dense_replace or layer % config.moe_layer_freq != 0
    return config.n_routed_experts is not None and not dense


def rope_section(raw: Raw) -> Raw:
    """The legacy dict, where there is one, replaces the new one."""
    return Raw(raw.get("rope_scaling") or raw.get("rope_parameters") or {})


def read_yarn(rope: Raw, raw: Raw) -> Yarn | None:
    # partial_rotary_factor may sit here too: MLA rotates all R channels whatever it says
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type '{kind}'; the reference has 'default', 'yarn'")
    return Yarn(
        factor=rope["factor"],
        original_max_position_embeddings=rope.get("original_max_position_embeddings")
        or raw["max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        truncate=rope.get("truncate", True),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale") or 0.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        apply_yarn_scaling=rope.get("apply_yarn_scaling", True),
    )


def mscale(factor: float, m: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def softmax_scale(config: Config) -> float:
    """From the query-key width P + R; the latent width L + R has no part in it."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.yarn is not None and config.yarn.apply_yarn_scaling:
        scale *= mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def cos_sin_scale(config: Config) -> float:
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def inverse_frequencies(config: Config) -> Tensor:
    return frequencies(config.rope_theta, config.yarn, config.qk_rope_head_dim)


def linear_inverse_frequencies(config: Config) -> Tensor:
    """Of the linear layers, over the channels that rotate there; empty where none do."""
    return frequencies(config.rope_theta, config.yarn, config.linear_facts.rotary_dim)


def layer_is_linear(config: Config, layer: int) -> bool:
    linear = config.linear
    return linear is not None and bailing.is_linear(linear, config.num_hidden_layers, layer)


def frequencies(theta: float, yarn: Yarn | None, dim: int) -> Tensor:
    """[dim/2], float32 in exactly this order of operations: another order has other bits."""
    wavelength = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / wavelength
    if yarn is None:
        return plain
    keep = 1 - yarn_ramp(theta, yarn, dim)
    return (1.0 / (yarn.factor * wavelength)) * (1 - keep) + plain * keep


def yarn_ramp(theta: float, yarn: Yarn, dim: int) -> Tensor:
    """0 where a channel keeps its frequency, 1 where it is slowed by the full factor."""

    def channel(rotations: float) -> float:
        length = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(length)) / (2 * math.log(theta))

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def v4_layer_rope(raw_config: Mapping[str, object], layer: int) -> tuple[Tensor, float, float]:
    """DeepSeek V4: (inv_freq, cos_sin_scale, softmax_scale) of one layer."""
    config = config_of(Raw(raw_config), LATENT_NORM_EPS, bailing.LAYER_FACTORS[0])
    return v4_inverse_frequencies(config, layer), 1.0, v4_facts.softmax_scale(config.v4_facts)


def v4_inverse_frequencies(config: Config, layer: int) -> Tensor:
    """Layers with a compressor rotate by compress_rope_theta under YaRN, the others by rope_theta
    without it; no mscale touches the table."""
    facts, dim = config.v4_facts, config.qk_rope_head_dim
    if facts.forms[layer] == v4_facts.WINDOW:
        return frequencies(config.rope_theta, None, dim)
    return frequencies(facts.compress_rope_theta, config.yarn, dim)
