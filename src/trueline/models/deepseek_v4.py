"""DeepSeek-V4: its facts resolved for `inspect`. Not runnable yet.

Two forms of the same configuration: flat as published, nested as transformers saves it.
"""

from __future__ import annotations

from typing import TypeGuard

from trueline.models.common import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ROPE_KEYS,
    check_architectures,
    finish,
    read_dtype,
    read_layer_types,
    read_shared_width,
    read_token_ids,
    read_yarn,
    whole,
)
from trueline.models.storage import read_storage
from trueline.spec.feedforward import MoESpec, RouterSpec
from trueline.spec.fields import Fields
from trueline.spec.mixer import CompressedSpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.rope import RopeSpec, YarnSpec
from trueline.spec.source import Fact, Source, default, formula

ARCHITECTURES = ("DeepseekV4ForCausalLM",)
NOT_RUNNABLE = (
    "not runnable yet: DeepSeek-V4's compressed attention and hyper-connections have no engine"
)
LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def read(fields: Fields, overrides: dict[str, object]) -> ModelSpec:
    fields.ignore("model_type")
    check_architectures(fields, ARCHITECTURES)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS).value
    max_position = fields.integer("max_position_embeddings")
    ratios = read_ratios(fields, num_layers)
    plain, compressed = read_ropes(fields, max_position)
    mixers = {
        ratio: read_mixer(fields, ratio, compressed if ratio else plain, ratios.source)
        for ratio in sorted(set(ratios.value))
    }
    hashed = read_hashed_layers(fields, num_layers)
    moes = {kind: read_moe(fields, kind, hashed.source) for kind in set(hashed.value)}
    for key in ("hc_mult", "hc_sinkhorn_iters"):
        fields.integer(key)
    fields.number("hc_eps")
    spec = ModelSpec.of(
        family=Fact("deepseek_v4", Source("key", "model_type")),
        hidden_size=fields.integer("hidden_size"),
        vocab=whole(fields.integer("vocab_size")),
        norm_eps=fields.number("rms_norm_eps", maximum=0.1),
        max_position=max_position,
        tied_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=read_dtype(fields),
        mtp_layers=fields.integer("num_nextn_predict_layers", minimum=0, maximum=MAX_LAYERS),
        eos_token_ids=read_token_ids(fields, "eos_token_id"),
        layers=tuple(
            LayerSpec(
                index=layer,
                mixer=mixers[ratios.value[layer]],
                feed_forward=moes[hashed.value[layer]],
            )
            for layer in range(num_layers)
        ),
        storage=read_storage(fields),
        not_runnable=NOT_RUNNABLE,
    )
    finish(fields)
    return spec


def read_ratios(fields: Fields, num_layers: int) -> Fact[tuple[int, ...]]:
    """Compression per layer: 0 is a plain window. The published list also covers draft layers."""
    rates = fields.section("compress_rates")
    if rates is not None:
        for name, ratio in LAYER_TYPES.items():
            if ratio:
                rates.must_equal(name, ratio, "DeepSeek-V4's published rate")
        rates.finish({})
    if fields.has("layer_types"):
        kinds = read_layer_types(fields, "layer_types", LAYER_TYPES, num_layers)
        fields.ignore("compress_ratios")
        return Fact(tuple(LAYER_TYPES[kind] for kind in kinds.value), kinds.source)

    def is_ratio(value: object) -> TypeGuard[int]:
        return type(value) is int and value in LAYER_TYPES.values()

    ratios = fields.list_of(
        "compress_ratios",
        is_ratio,
        f"{sorted(LAYER_TYPES.values())}, one for each layer and then the draft layers",
        length=None,
    )
    if len(ratios.value) < num_layers:
        fields.refuse("compress_ratios", f"at least num_hidden_layers = {num_layers} entries")
    return Fact(ratios.value[:num_layers], ratios.source)


def read_ropes(fields: Fields, max_position: Fact[int]) -> tuple[RopeSpec, RopeSpec]:
    """For window-only layers (rope_theta, no YaRN) and for compressed ones."""
    head_dim = fields.integer("head_dim").value
    dim = fields.integer("qk_rope_head_dim", minimum=2, maximum=head_dim)
    if dim.value % 2:
        fields.refuse("qk_rope_head_dim", "an even number: rotation acts on pairs of channels")
    share = dim.value / head_dim
    fields.must_equal("partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
    base = fields.number("rope_theta", above=1.0)
    compressed_base = fields.number("compress_rope_theta", above=1.0)
    section = fields.section("rope_parameters", accepts=ROPE_KEYS)
    yarn_section = fields.section("rope_scaling", accepts=ROPE_KEYS)
    if section is not None:
        if yarn_section is not None:
            fields.refuse("rope_scaling", "only one of rope_parameters and rope_scaling")
        main = section.section("main", accepts=ROPE_KEYS)
        yarn_section = section.section("compress", accepts=ROPE_KEYS)
        section.finish({})
        if main is not None:
            main.must_equal("partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
            main.must_equal("rope_theta", base.value, "the top-level rope_theta")
            main.must_equal("rope_type", "default", "window layers have no YaRN")
            main.finish({})
    yarn: Fact[YarnSpec | None] = default(None, "neither rope_scaling nor rope_parameters")
    if yarn_section is not None:
        yarn_section.must_equal("partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
        yarn_section.must_equal("rope_theta", compressed_base.value, "compress_rope_theta")
        yarn_section.must_equal("attention_factor", 1.0, "DeepSeek-V4 applies no magnitude")
        yarn = read_yarn(yarn_section, max_position)
        yarn_section.finish({})
    no_magnitude = formula(False, "deepseek_v4: no mscale, neither on cos/sin nor on the scale")
    interleaved = default("interleaved", "deepseek_v4 rotates interleaved channels")
    common = {"dim": dim, "pairing": interleaved, "yarn_scales_magnitude": no_magnitude}
    return (
        RopeSpec.of(
            **common, base=base, yarn=formula(None, "deepseek_v4: window layers have none")
        ),
        RopeSpec.of(**common, base=compressed_base, yarn=yarn),
    )


def read_mixer(fields: Fields, ratio: int, rope: RopeSpec, source: Source) -> CompressedSpec:
    fields.must_equal("num_key_value_heads", 1, "one key-value head serves all")
    return CompressedSpec.of(
        heads=whole(fields.integer("num_attention_heads")),
        head_dim=fields.integer("head_dim"),
        compress_ratio=Fact(ratio, source),
        sliding_window=fields.integer("sliding_window"),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        index_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        rope=rope,
    )


def read_hashed_layers(fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    if fields.has("mlp_layer_types"):
        kinds = read_layer_types(fields, "mlp_layer_types", ("hash_moe", "moe"), num_layers)
        return Fact(tuple(kind == "hash_moe" for kind in kinds.value), kinds.source)
    first = fields.integer("num_hash_layers", minimum=0, maximum=num_layers)
    return Fact(tuple(layer < first.value for layer in range(num_layers)), first.source)


def read_moe(fields: Fields, hashed: bool, source: Source) -> MoESpec:
    experts = fields.integer("n_routed_experts", maximum=MAX_EXPERTS)
    width = fields.integer("moe_intermediate_size")
    fields.must_equal("topk_method", "noaux_tc", "here it means only: bias for selection")
    fields.must_equal("norm_topk_prob", True, "DeepSeek-V4 always renormalises")
    return MoESpec.of(
        experts=whole(experts),
        expert_width=whole(width),
        shared_width=read_shared_width(fields, width),
        swiglu_limit=fields.number("swiglu_limit"),
        router=RouterSpec.of(
            scoring=fields.choice("scoring_func", ("sqrtsoftplus",)),
            correction_bias=formula(not hashed, "deepseek_v4: all but hash layers"),
            num_groups=formula(1, "deepseek_v4 has no groups"),
            top_groups=formula(1, "deepseek_v4 has no groups"),
            group_score=None,
            top_k=fields.integer("num_experts_per_tok", maximum=experts.value),
            renormalise=formula(True, "deepseek_v4 always does"),
            scaling_factor=fields.number("routed_scaling_factor"),
            hashed=Fact(hashed, source),
        ),
    )
