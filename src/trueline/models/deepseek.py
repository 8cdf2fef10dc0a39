"""DeepSeek's decoder (latent attention, dense layers first, then experts) and its families.

A `Line` says only what a family has of its own: how it routes, whether its rope may be half-split,
whether it lists its layer types, whether an indexer selects its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trueline.models.common import (
    MAX_EXPERTS,
    MAX_LAYERS,
    check_architectures,
    finish,
    read_dtype,
    read_layer_types,
    read_mtp_layers,
    read_override,
    read_rope,
    read_shared_width,
    read_tied,
    read_token_ids,
    whole,
)
from trueline.models.indexer import Indexing, read_indexer, read_shared_layers, rewritten
from trueline.models.storage import read_storage
from trueline.spec.feedforward import DenseSpec, FeedForwardSpec, MoESpec, RouterSpec
from trueline.spec.fields import Fields
from trueline.spec.mixer import MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.rope import RopeSpec
from trueline.spec.source import Fact, Source, default, formula

MAX_HEADS = 65536

# q_a_layernorm and kv_a_layernorm: transformers builds them without an eps, so 1e-6, while
# serving engines pass rms_norm_eps. Where the two differ we follow transformers.
LATENT_NORM_EPS = default(1e-6, "transformers' value, whatever rms_norm_eps says")

MOE_KEYS = (
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
    "first_k_dense_replace",
)


@dataclass(frozen=True)
class Line:
    model_type: str
    architectures: tuple[str, ...]
    read_router: Callable[[Fields, int, str], RouterSpec]
    rope_may_be_half_split: bool = True
    lists_layer_types: bool = False
    dense_layers: int | None = None
    """How many layers are dense where the file does not say; None: it must."""
    indexing: Indexing | None = None

    def read(self, fields: Fields, overrides: dict[str, object]) -> ModelSpec:
        fields.ignore("model_type")
        spec = read_decoder(self, fields, overrides)
        finish(fields)
        return spec


def read_decoder(line: Line, fields: Fields, overrides: dict[str, object]) -> ModelSpec:
    """The whole model from one JSON object; the caller finishes `fields`."""
    check_architectures(fields, line.architectures)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    max_position = fields.integer("max_position_embeddings")
    mixers = read_mixers(line, fields, overrides, num_layers.value, max_position)
    is_moe = read_layer_kinds(line, fields, num_layers.value)
    dense = DenseSpec.of(width=whole(fields.integer("intermediate_size")))
    moe = read_moe(line, fields) if any(is_moe.value) else None
    if moe is None:
        fields.ignore(*MOE_KEYS)

    def feed_forward(layer: int) -> FeedForwardSpec:
        return moe if moe is not None and is_moe.value[layer] else dense

    layers = tuple(
        LayerSpec(
            index=layer,
            mixer=mixer,
            feed_forward=feed_forward(layer),
            sources={"feed_forward": is_moe.source},
        )
        for layer, mixer in enumerate(mixers)
    )
    return ModelSpec.of(
        family=Fact(line.model_type, Source("key", f"{fields.prefix}model_type")),
        hidden_size=fields.integer("hidden_size"),
        vocab=whole(fields.integer("vocab_size")),
        norm_eps=fields.number("rms_norm_eps", maximum=0.1),
        max_position=max_position,
        tied_embeddings=read_tied(fields),
        dtype=read_dtype(fields),
        mtp_layers=read_mtp_layers(fields),
        eos_token_ids=read_token_ids(fields, "eos_token_id"),
        layers=layers,
        storage=read_storage(fields),
    )


def read_mixers(
    line: Line,
    fields: Fields,
    overrides: dict[str, object],
    num_layers: int,
    max_position: Fact[int],
) -> tuple[MLASpec, ...]:
    """Of each layer. They are one, but that some may select keys and others see that selection."""
    rope = read_rope(
        fields,
        dim=mla_rope_dim(fields),
        pairing=_pairing(line, fields),
        max_position=max_position,
    )
    mixer = read_mla(fields, rope, overrides)
    fields.must_equal(
        "num_key_value_heads", mixer.heads.total, "one latent serves as many heads as there are"
    )
    if line.indexing is None:
        return (mixer,) * num_layers
    shared = read_shared_layers(fields, line.indexing, num_layers)
    indexer = read_indexer(fields, line.indexing, rope, line.model_type)
    kinds = {
        kind: replace(mixer, indexer=rewritten(indexer, shared=Fact(kind, shared.source)))
        for kind in (False, True)
    }
    return tuple(kinds[kind] for kind in shared.value)


def mla_rope_dim(fields: Fields) -> Fact[int]:
    """What latent attention rotates: its own key, whatever partial_rotary_factor says."""
    dim = fields.integer("qk_rope_head_dim", minimum=2)
    if dim.value % 2:
        fields.refuse("qk_rope_head_dim", "an even number: rotation acts on pairs of channels")
    return replace_source(dim, "all of qk_rope_head_dim")


def read_mla(fields: Fields, rope: RopeSpec, overrides: dict[str, object]) -> MLASpec:
    rope_dim = fields.integer("qk_rope_head_dim")
    nope_dim = fields.integer("qk_nope_head_dim")
    fields.must_equal("qk_head_dim", nope_dim.value + rope_dim.value, "nope + rope head dims")
    return MLASpec.of(
        heads=whole(fields.integer("num_attention_heads", maximum=MAX_HEADS)),
        q_lora_rank=fields.integer_or_null("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        latent_norm_eps=read_override(overrides, "latent_norm_eps", LATENT_NORM_EPS, 0.1),
        rope=rope,
    )


def _pairing(line: Line, fields: Fields) -> Fact[str]:
    published = default("interleaved", f"{line.model_type} rotates interleaved channels")
    if not line.rope_may_be_half_split:
        fields.must_equal(
            "rope_interleave", True, "this family always rotates interleaved channels"
        )
        return published
    if not fields.has("rope_interleave"):
        return published
    interleave = fields.boolean("rope_interleave")
    return Fact("interleaved" if interleave.value else "half-split", interleave.source)


def read_layer_kinds(line: Line, fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    """For each layer: is it MoE?"""
    if fields.integer_or_null("n_routed_experts").value is None:
        fields.ignore("mlp_layer_types")
        return formula((False,) * num_layers, "n_routed_experts is null: every layer is dense")
    if line.lists_layer_types and fields.has("mlp_layer_types"):
        fields.ignore("first_k_dense_replace", "moe_layer_freq")
        kinds = read_layer_types(fields, "mlp_layer_types", ("dense", "sparse"), num_layers)
        return Fact(tuple(kind == "sparse" for kind in kinds.value), kinds.source)
    first = _first_moe_layer(line, fields, num_layers)
    every = fields.integer(
        "moe_layer_freq", maximum=MAX_LAYERS, default=default(1, "1 in every release")
    )
    return formula(
        tuple(layer >= first.value and layer % every.value == 0 for layer in range(num_layers)),
        f"MoE where layer >= {first.value} ({first.source.text}) and layer % {every.value} "
        "(moe_layer_freq) == 0",
    )


def _first_moe_layer(line: Line, fields: Fields, num_layers: int) -> Fact[int]:
    key = "first_k_dense_replace"
    if line.dense_layers is not None and not fields.has(key):
        return default(line.dense_layers, f"{line.model_type}: the first layer is dense")
    return fields.integer(key, minimum=0, maximum=num_layers)


def read_moe(line: Line, fields: Fields) -> MoESpec:
    if line.indexing is not None:
        precise = default("float32", "the router decides which experts run")
        fields.choice("moe_router_dtype", ("float32", "fp32"), default=precise)
    experts = fields.integer("n_routed_experts", maximum=MAX_EXPERTS)
    width = fields.integer("moe_intermediate_size")
    return MoESpec.of(
        experts=whole(experts),
        expert_width=whole(width),
        shared_width=read_shared_width(fields, width),
        router=line.read_router(fields, experts.value, line.model_type),
    )


def read_softmax_router(fields: Fields, num_experts: int, family: str) -> RouterSpec:
    """DeepSeek-V2: softmax scores, never renormalised; greedy, or limited to the best groups."""
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"))
    fields.must_equal(
        "norm_topk_prob",
        False,
        "published implementations of this family contradict each other on true",
    )
    if method.value == "greedy":
        fields.ignore("n_group", "topk_group")
        groups = top_groups = formula(1, "greedy: groups are not used")
    else:
        groups, top_groups = read_groups(fields, num_experts, smallest=1)
    return RouterSpec.of(
        scoring=fields.choice(
            "scoring_func", ("softmax",), default=default("softmax", f"{family}: no other")
        ),
        correction_bias=formula(False, f"{family} has none"),
        num_groups=groups,
        top_groups=top_groups,
        group_score=group_score("max", groups, "group_limited_greedy: a group's best score"),
        top_k=read_top_k(fields, num_experts, groups, top_groups),
        renormalise=formula(False, f"{family} never does"),
        scaling_factor=fields.number("routed_scaling_factor"),
    )


def read_sigmoid_router(fields: Fields, num_experts: int, family: str) -> RouterSpec:
    """DeepSeek-V3: sigmoid scores, a correction bias for choosing, groups by their best two."""
    scoring = fields.choice(
        "scoring_func", ("sigmoid",), default=default("sigmoid", f"{family}: no other")
    )
    method = fields.choice(
        "topk_method", ("noaux_tc",), default=default("noaux_tc", f"{family}: no other")
    )
    groups, top_groups = read_groups(fields, num_experts, smallest=2)
    return RouterSpec.of(
        scoring=scoring,
        correction_bias=Fact(True, method.source),
        num_groups=groups,
        top_groups=top_groups,
        group_score=group_score(
            "top2_sum", groups, "noaux_tc: sum of a group's two best biased scores"
        ),
        top_k=read_top_k(fields, num_experts, groups, top_groups),
        renormalise=fields.boolean("norm_topk_prob"),
        scaling_factor=fields.number("routed_scaling_factor"),
    )


def group_score(how: str, groups: Fact[int], why: str) -> Fact[str | None]:
    return formula(how, why) if groups.value > 1 else formula(None, "one group")


def read_groups(fields: Fields, num_experts: int, smallest: int) -> tuple[Fact[int], Fact[int]]:
    groups = fields.integer("n_group", maximum=num_experts)
    if num_experts % groups.value or num_experts // groups.value < smallest:
        fields.refuse(
            "n_group",
            f"a divisor of the {num_experts} routed experts that leaves groups of >= {smallest}",
        )
    return groups, fields.integer("topk_group", maximum=groups.value)


def read_top_k(
    fields: Fields, num_experts: int, groups: Fact[int], top_groups: Fact[int], least: int = 1
) -> Fact[int]:
    reachable = num_experts // groups.value * top_groups.value
    return fields.integer("num_experts_per_tok", minimum=least, maximum=reachable)


def replace_source(fact: Fact[int], text: str) -> Fact[int]:
    return replace(fact, source=Source("formula", text))


DEEPSEEK_V2 = Line(
    "deepseek_v2", ("DeepseekV2ForCausalLM",), read_softmax_router, rope_may_be_half_split=False
)
DEEPSEEK_V3 = Line("deepseek_v3", ("DeepseekV3ForCausalLM",), read_sigmoid_router)
KIMI_K2 = Line("kimi_k2", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), read_sigmoid_router)
GLM4_MOE_LITE = Line(
    "glm4_moe_lite",
    ("Glm4MoeLiteForCausalLM",),
    read_sigmoid_router,
    lists_layer_types=True,
    dense_layers=1,
)
DEEPSEEK_V32 = Line(
    "deepseek_v32",
    ("DeepseekV32ForCausalLM",),
    read_sigmoid_router,
    rope_may_be_half_split=False,
    lists_layer_types=True,
    indexing=Indexing(interleaved=False),
)
GLM_MOE_DSA = Line(
    "glm_moe_dsa",
    ("GlmMoeDsaForCausalLM",),
    read_sigmoid_router,
    rope_may_be_half_split=False,
    lists_layer_types=True,
    indexing=Indexing(interleaved=True, may_share=True),
)
