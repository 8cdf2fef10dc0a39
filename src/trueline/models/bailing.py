"""BailingMoeV2.5 (Ling 2.5 and 2.6, Ring 2.5): linear attention, every G-th layer latent attention,
experts behind both.

`model_type` bailing_hybrid names two architectures. Which one a file holds is what `architectures`
says; Ling 3 (gated delta attention) is refused by its name, never read as this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trueline.models.common import (
    MAX_EXPERTS,
    MAX_LAYERS,
    choose_override,
    finish,
    read_dtype,
    read_mtp_layers,
    read_shared_rope,
    read_shared_width,
    read_tied,
    read_token_ids,
    rope_section,
    whole,
)
from trueline.models.deepseek import (
    MAX_HEADS,
    group_score,
    mla_rope_dim,
    read_groups,
    read_mla,
    read_top_k,
)
from trueline.models.storage import read_storage
from trueline.spec.feedforward import DenseSpec, MoESpec, RouterSpec
from trueline.spec.fields import Fields
from trueline.spec.mixer import LightningSpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.rope import RopeSpec
from trueline.spec.source import Fact, Source, default, formula

FAMILY: Final = "bailing_moe_v2_5"
ARCHITECTURE: Final = "BailingMoeV2_5ForCausalLM"
RENAMED: Final = (
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".self_attn.", ".attention."),
    (".gate.e_score_correction_bias", ".gate.expert_bias"),
)
# Keys that only Ling 3 has, whatever its file calls its architecture.
LING_3_KEYS: Final = ("kda_", "short_conv_", "no_kda_", "gated_attention_proj_")

# Serving engines count layers from 0, the authors' published code as if from 1.
LAYER_FACTOR = default("l", "serving engines' value; the authors' published code has l-1")


def read(fields: Fields, overrides: dict[str, object]) -> ModelSpec:
    fields.ignore("model_type")
    check_dispatch(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    norm_eps = fields.number("rms_norm_eps", maximum=0.1)
    max_position = fields.integer("max_position_embeddings")
    mla_rope, linear_rope = read_ropes(fields, max_position)
    mla = read_mla(fields, mla_rope, overrides)
    # Neither kind groups its heads: the key says nothing.
    fields.ignore("num_key_value_heads")
    linear = read_lightning(fields, linear_rope, norm_eps, num_layers.value, overrides)
    is_mla = read_mla_layers(fields, num_layers.value)
    dense = DenseSpec.of(width=whole(fields.integer("intermediate_size")))
    moe = read_moe(fields)
    first = fields.integer("first_k_dense_replace", minimum=0, maximum=num_layers.value)
    layers = tuple(
        LayerSpec(
            index=layer,
            mixer=mla if is_mla.value[layer] else at_layer(linear, layer),
            feed_forward=moe if layer >= first.value else dense,
            sources={
                "mixer": is_mla.source,
                "feed_forward": Source(
                    "formula", f"MoE where layer >= {first.value} (first_k_dense_replace)"
                ),
            },
        )
        for layer in range(num_layers.value)
    )
    tied = read_tied(fields)
    spec = ModelSpec.of(
        family=Fact(FAMILY, Source("key", "architectures")),
        hidden_size=fields.integer("hidden_size"),
        vocab=whole(fields.integer("vocab_size")),
        norm_eps=norm_eps,
        max_position=max_position,
        tied_embeddings=tied,
        norm_head=read_norm_head(fields, tied.value),
        dtype=read_dtype(fields),
        mtp_layers=read_mtp_layers(fields),
        eos_token_ids=read_token_ids(fields, "eos_token_id"),
        layers=layers,
        storage=read_storage(fields),
        renamed=RENAMED,
    )
    finish_bailing(fields)
    return spec


def check_dispatch(fields: Fields) -> None:
    """Two architectures share this model_type: the file must say that it is this one."""
    found = fields.raw.get("architectures")
    fields.ignore("architectures")
    if found != [ARCHITECTURE]:
        fields.refuse(
            "architectures",
            f'["{ARCHITECTURE}"]: model_type bailing_hybrid is also that of Ling 3 '
            "(BailingHybridForCausalLM, BailingMoeV3ForCausalLM), which cannot be run yet: gated "
            "delta attention (KDA), gated latent attention",
        )
    foreign = [key for key in fields.raw if key.startswith(LING_3_KEYS)]
    if foreign:
        fields.refuse(foreign[0], f"nothing: it is a key of Ling 3, not of {ARCHITECTURE}")


def at_layer(linear: LightningSpec, layer: int) -> LightningSpec:
    """Slopes go by the place among all layers; linear ones are not numbered apart."""
    return replace(linear, layer=layer)


def read_mla_layers(fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    group = fields.integer("layer_group_size", maximum=MAX_LAYERS).value
    tail = num_layers // group * group
    return formula(
        tuple((layer + 1) % group == 0 or layer >= tail for layer in range(num_layers)),
        f"latent where (layer + 1) % {group} (layer_group_size) == 0 or layer >= {tail}, "
        "else linear",
    )


def read_ropes(fields: Fields, max_position: Fact[int]) -> tuple[RopeSpec, Fact[object]]:
    """Of latent layers: interleaved, all of their rotated key. Of linear layers: half-split, a
    share of the head. Both have the same base and scaling, each over its own width."""
    section = rope_section(fields)
    dim = read_linear_rope_dim(fields, section)
    shared = read_shared_rope(fields, section, max_position)
    fields.must_equal(
        "rope_interleave", True, "this family's latent attention rotates interleaved channels"
    )
    mla = RopeSpec.of(
        dim=mla_rope_dim(fields),
        pairing=default("interleaved", f"{FAMILY}: latent layers rotate interleaved channels"),
        **shared,
    )
    rotates = fields.boolean("linear_rope", default=default(True, "linear layers rotate"))
    if not rotates.value:
        return mla, Fact(None, rotates.source)
    half_split = default("half-split", f"{FAMILY}: linear layers rotate half-split channels")
    return mla, Fact(RopeSpec.of(dim=dim, pairing=half_split, **shared), rotates.source)


def read_linear_rope_dim(fields: Fields, section: Fields | None) -> Fact[int]:
    """head_dim × partial_rotary_factor; the factor may stand in the rope section too."""
    head_dim = fields.integer("head_dim", maximum=MAX_HEADS).value
    key = "partial_rotary_factor"
    inside = section is not None and section.has(key)
    if inside and fields.has(key):
        fields.must_equal(key, section.raw[key] if section else None, "one factor")
    place = section if inside and section else fields
    share = place.number(key, maximum=1.0)
    dim = int(head_dim * share.value)
    if dim < 2 or dim % 2 or dim != head_dim * share.value:
        place.refuse(key, f"a share of head_dim = {head_dim} that is an even number of channels")
    fields.must_equal("rotary_dim", dim, "head_dim × partial_rotary_factor")
    return formula(dim, f"head_dim × {share.source.text}: the first channels of each head")


def read_lightning(
    fields: Fields,
    rope: Fact[object],
    norm_eps: Fact[float],
    num_layers: int,
    overrides: dict[str, object],
) -> LightningSpec:
    heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    head_dim = fields.integer("head_dim", maximum=MAX_HEADS)
    groups = fields.integer("group_norm_size")
    if heads.value * head_dim.value % groups.value:
        fields.refuse(
            "group_norm_size",
            f"a number of groups that divides {heads.value} heads × {head_dim.value} channels",
        )
    return LightningSpec.of(
        heads=whole(heads),
        head_dim=head_dim,
        rope=rope,
        qk_norm=fields.boolean("use_qk_norm"),
        silu=fields.boolean(
            "linear_silu",
            aliases=("use_linear_silu",),
            default=default(False, "no silu in any release"),
        ),
        norm_groups=whole(groups),
        norm_eps=norm_eps,
        linear_layer_factor=choose_override(
            overrides, "linear_layer_factor", LAYER_FACTOR, ("l", "l-1")
        ),
        layer=0,
        num_layers=num_layers,
    )


def read_moe(fields: Fields) -> MoESpec:
    experts = fields.integer("num_experts", maximum=MAX_EXPERTS)
    width = fields.integer("moe_intermediate_size")
    shared = fields.integer("moe_shared_expert_intermediate_size", default=width)
    groups, top_groups = read_groups(fields, experts.value, smallest=2)
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.must_equal(key, only, f"{FAMILY} has no other")
    fields.must_equal("norm_topk_prob", True, f"{FAMILY} always renormalises")
    fields.must_equal("router_dtype", "fp32", "the router decides which experts run")
    fields.must_equal("moe_router_enable_expert_bias", True, "every release has the bias")
    return MoESpec.of(
        experts=whole(experts),
        expert_width=whole(width),
        shared_width=read_shared_width(fields, shared, "num_shared_experts"),
        router=RouterSpec.of(
            scoring=fields.choice(
                "score_function", ("sigmoid",), default=default("sigmoid", f"{FAMILY}: no other")
            ),
            correction_bias=formula(True, f"{FAMILY}: expert_bias, for choosing only"),
            num_groups=groups,
            top_groups=top_groups,
            group_score=group_score("top2_sum", groups, "sum of a group's two best biased scores"),
            # with one expert the authors' code does not renormalise, and engines do
            top_k=read_top_k(fields, experts.value, groups, top_groups, least=2),
            renormalise=formula(True, f"{FAMILY} always does"),
            scaling_factor=fields.number("routed_scaling_factor"),
        ),
    )


def read_norm_head(fields: Fields, tied: bool) -> Fact[bool]:
    norm_head = fields.boolean("norm_head", default=default(False, "lm_head as stored"))
    if norm_head.value and tied:
        fields.refuse("norm_head", "false where tie_word_embeddings is true: one table, two sizes")
    return norm_head


def finish_bailing(fields: Fields) -> None:
    for key in ("use_bias", "use_qkv_bias"):
        fields.must_equal(key, False, "published sources disagree on where biases would stand")
    for key in (
        "use_rmsnorm",
        "moe_router_enable_routed_scaling",
        "moe_router_enable_shared_expert",
    ):
        fields.must_equal(key, True, "no release does without")
    # Of a sliding window that no layer of this family has.
    fields.ignore("max_window_layers")
    finish(fields)
