"""What config.json means for BailingMoeV2.5 (Ling 2.5 and 2.6) where it leaves the DeepSeek line:
the linear layers, and keys under other names. Read a second time on purpose, as in `config.py`."""

from dataclasses import dataclass

from trueline.errors import ConfigError
from trueline.reference.raw import Raw

ARCHITECTURE = "BailingMoeV2_5ForCausalLM"  # Ling 3 has the same model_type
LAYER_FACTORS = ("l", "l-1")  # serving engines; the authors' published code

COMPUTED: dict[str, object] = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_interleave": True,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
}


@dataclass(frozen=True)
class LinearFacts:
    """The linear layers; they have as many heads as the latent ones."""

    head_dim: int
    rotary_dim: int  # the first channels of each head; 0 where nothing rotates
    use_qk_norm: bool
    silu: bool
    group_norm_size: int  # how many groups, not how wide
    layer_group_size: int
    layer_factor: str  # one of LAYER_FACTORS


def in_deepseek_words(raw: Raw) -> Raw:
    """The keys that DeepSeek's line has too, under its names."""
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ConfigError(
            f"config.json: architectures={raw.get('architectures')!r} under model_type "
            f"bailing_hybrid; the reference has ['{ARCHITECTURE}']"
        )
    for key, value in COMPUTED.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={raw[key]!r}; the reference computes {value!r}")
    shared = raw.get("moe_shared_expert_intermediate_size") or raw["moe_intermediate_size"]
    return Raw(
        {
            **raw,
            "model_type": "bailing_moe_v2_5",
            "n_routed_experts": raw["num_experts"],
            "n_shared_experts": raw["num_shared_experts"],
            "shared_expert_width": shared,
            "norm_topk_prob": True,
        }
    )


def read_linear(raw: Raw, rope: Raw, layer_factor: str) -> LinearFacts:
    if layer_factor not in LAYER_FACTORS:
        raise ConfigError(f"linear_layer_factor '{layer_factor}'; the reference has 'l', 'l-1'")
    key = "partial_rotary_factor"
    share = rope[key] if key in rope else raw[key]
    return LinearFacts(
        head_dim=raw["head_dim"],
        rotary_dim=round(raw["head_dim"] * share) if raw.get("linear_rope", True) else 0,
        use_qk_norm=raw["use_qk_norm"],
        silu=raw.get("linear_silu", raw.get("use_linear_silu", False)),
        group_norm_size=raw["group_norm_size"],
        layer_group_size=raw["layer_group_size"],
        layer_factor=layer_factor,
    )


def is_linear(linear: LinearFacts, num_layers: int, layer: int) -> bool:
    """The last layer of each group, and every layer behind the last whole group, is latent."""
    group, place = divmod(layer, linear.layer_group_size)
    whole_groups = num_layers // linear.layer_group_size
    return group < whole_groups and place < linear.layer_group_size - 1


def slopes(linear: LinearFacts, num_heads: int, num_layers: int, layer: int) -> list[float]:
    """Per head: the state decays by exp(-slope) at every token of this layer."""
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    heads = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    # no power of two: the odd-numbered heads of twice as many fill up
    heads += [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * (num_heads - power), 2)]
    l = layer - LAYER_FACTORS.index(linear.layer_factor)  # noqa: E741
    return [slope * (1 - l / (num_layers - 1) + 1e-5) for slope in heads]
