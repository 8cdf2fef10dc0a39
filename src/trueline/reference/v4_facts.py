"""What config.json means for DeepSeek V4 where it leaves the DeepSeek line, flat as published or
nested as transformers saves it. Read a second time on purpose, as in `config.py`. Nothing comes
from a class default: those of transformers and of serving engines describe no published model."""

from dataclasses import dataclass
from typing import TypeVar

from trueline.errors import ConfigError
from trueline.reference.raw import Raw

K = TypeVar("K")
V = TypeVar("V")

FAMILY = "deepseek_v4"
WINDOW, SPARSE, ALL = "window", "sparse", "all"
FORMS = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": ALL,
}
PUBLISHED_RATIOS = {0: WINDOW, 4: SPARSE, 128: ALL}
MLP_KINDS = {"hash_moe": True, "moe": False}

WITHOUT_MAGNITUDE = {"attention_factor": 1.0, "apply_yarn_scaling": False}
COMPUTED: dict[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class V4Facts:
    head_dim: int
    sliding_window: int  # positions that a query sees, its own included
    o_groups: int
    o_lora_rank: int
    forms: tuple[str, ...]  # per layer: WINDOW, or with compressed entries: SPARSE, ALL
    ratios: tuple[int, ...]  # per layer: tokens of a compressed entry; 0 in WINDOW layers
    hashed: tuple[bool, ...]  # per layer: experts by token id
    compress_rope_theta: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    swiglu_limit: float


AS_WRITTEN = (
    *("head_dim", "sliding_window", "o_groups", "o_lora_rank", "swiglu_limit"),
    *("index_n_heads", "index_head_dim", "index_topk"),
    *("hc_mult", "hc_sinkhorn_iters", "hc_eps"),
)


def softmax_scale(facts: V4Facts) -> float:
    """No mscale: YaRN has no part in it."""
    return float(facts.head_dim**-0.5)


def read_facts(raw: Raw) -> V4Facts:
    for key, value in COMPUTED.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={raw[key]!r}; the reference computes {value!r}")
    forms, ratios = layer_forms(raw)
    _, compress = rope_sections(raw)
    facts = V4Facts(
        **{key: raw[key] for key in AS_WRITTEN},
        forms=forms,
        ratios=ratios,
        hashed=hash_layers(raw),
        compress_rope_theta=compress["rope_theta"],
    )
    for name, per_layer in (("attention", forms), ("feed-forward", facts.hashed)):
        if len(per_layer) != raw["num_hidden_layers"]:
            raise ConfigError(
                f"config.json: {len(per_layer)} {name} kinds for num_hidden_layers="
                f"{raw['num_hidden_layers']}; accepted: one a layer"
            )
    return facts


def layer_forms(raw: Raw) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Named with a rate each, or by the published numbers, which go on for draft layers."""
    count = raw["num_hidden_layers"]
    if kinds := raw.get("layer_types"):
        forms = tuple(chosen(FORMS, kind, "layer_types") for kind in kinds)
        rates = Raw(raw["compress_rates"])
        return forms, tuple(0 if FORMS[kind] == WINDOW else int(rates[kind]) for kind in kinds)
    ratios = tuple(raw["compress_ratios"][:count])
    return tuple(chosen(PUBLISHED_RATIOS, each, "compress_ratios") for each in ratios), ratios


def hash_layers(raw: Raw) -> tuple[bool, ...]:
    if kinds := raw.get("mlp_layer_types"):
        return tuple(chosen(MLP_KINDS, kind, "mlp_layer_types") for kind in kinds)
    return tuple(layer < raw["num_hash_layers"] for layer in range(raw["num_hidden_layers"]))


def chosen(table: dict[K, V], value: K, key: str) -> V:
    if value not in table:
        raise ConfigError(f"config.json: {key} has {value!r}; the reference has {list(table)}")
    return table[value]


def rope_sections(raw: Raw) -> tuple[Raw, Raw]:
    """Of window layers, and of layers with a compressor; each with its rope_theta."""
    section = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if "main" in section:
        main, compress = Raw(section["main"]), Raw(section["compress"])
    else:
        main = Raw(rope_theta=raw["rope_theta"])
        compress = Raw({**section, "rope_theta": raw["compress_rope_theta"]})
    if main.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config.json: rope_type '{main['rope_type']}' of window layers; "
            "the reference has 'default' there"
        )
    if compress.get("attention_factor") not in (None, 1.0):
        raise ConfigError(
            f"config.json: attention_factor={compress['attention_factor']!r}; no magnitude goes "
            "with DeepSeek V4's YaRN: accepted is 1.0"
        )
    return main, compress


def in_deepseek_words(raw: Raw) -> Raw:
    """The keys that the rest of the DeepSeek line has too, under its names."""
    main, compress = rope_sections(raw)
    share = raw.get("partial_rotary_factor") or compress.get("partial_rotary_factor")
    rotated = raw.get("qk_rope_head_dim") or (share and round(raw["head_dim"] * share))
    if not rotated:
        raise ConfigError(
            "config.json: neither 'qk_rope_head_dim' nor 'partial_rotary_factor' is there"
        )
    return Raw(
        {
            **{key: raw[key] for key in raw if key not in ("rope_parameters", "mlp_layer_types")},
            "rope_theta": main["rope_theta"],
            "rope_scaling": {
                **{key: compress[key] for key in compress if key != "rope_theta"},
                **WITHOUT_MAGNITUDE,
            },
            "kv_lora_rank": 0,  # a key is one row for all heads, and the value too
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": raw["head_dim"] - rotated,
            "v_head_dim": raw["head_dim"],
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        }
    )
