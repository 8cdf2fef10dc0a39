"""DeepSeek-V4: Flash, Pro and their Base variants.

Two forms of the same configuration: flat as published, nested as transformers saves it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeGuard

from trueline.models.common import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ROPE_KEYS,
    check_architectures,
    finish,
    read_dtype,
    read_layer_types,
    read_mtp_layers,
    read_token_ids,
    read_yarn,
    whole,
)
from trueline.models.storage import read_storage
from trueline.spec.feedforward import MoESpec, RouterSpec
from trueline.spec.fields import Fields
from trueline.spec.mixer import CompressedSpec, CompressorSpec, EntryIndexerSpec, Form
from trueline.spec.model import HyperConnectionsSpec, LayerSpec, ModelSpec, WeightStorage
from trueline.spec.rope import RopeSpec, YarnSpec
from trueline.spec.source import Fact, Source, default, formula

ARCHITECTURES = ("DeepseekV4ForCausalLM",)
FORMS: Final[dict[str, Form]] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "all",
}
# What the flat form's numbers mean.
PUBLISHED_RATIOS: Final[dict[int, Form]] = {0: "window", 4: "sparse", 128: "all"}
MAX_RATIO: Final = 65536
NO_MAGNITUDE: Final = formula(False, "deepseek_v4: no mscale, neither on cos/sin nor on the scale")
STORED_EXPERTS: Final = ("fp4", "fp8")
# What transformers writes beside the sections that it computes with, whatever these say.
CLASS_BASES: Final = {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
DRAFTING_KEYS: Final = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "n_mtp_layers",
    "draft_vocab_size",
    "sample_from_anchor",
)
RENAMED: Final = (
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.hc_head.", "hc_head_"),
    ("model.", ""),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".hc_attn.", ".hc_attn_"),
    (".hc_ffn.", ".hc_ffn_"),
    (".self_attn.", ".attn."),
    (".q_a_proj.", ".wq_a."),
    (".q_a_layernorm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".sinks", ".attn_sink"),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".position_bias", ".ape"),
    (".mlp.", ".ffn."),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)

Kind = tuple[Form, int]
"""Of a layer, with its compression ratio: 0 for a window alone."""


def read(fields: Fields, overrides: dict[str, object]) -> ModelSpec:
    fields.ignore("model_type")
    check_architectures(fields, ARCHITECTURES)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS).value
    max_position = fields.integer("max_position_embeddings")
    norm_eps = fields.number("rms_norm_eps", maximum=0.1)
    kinds = read_kinds(fields, num_layers)
    plain, compressed = read_ropes(fields, max_position)
    mixers = {
        kind: read_mixer(
            fields, Fact(kind, kinds.source), plain if kind[0] == "window" else compressed, norm_eps
        )
        for kind in sorted(set(kinds.value))
    }
    hashed = read_hashed_layers(fields, num_layers)
    moes = {kind: read_moe(fields, kind, hashed.source) for kind in set(hashed.value)}
    spec = ModelSpec.of(
        family=Fact("deepseek_v4", Source("key", "model_type")),
        hidden_size=fields.integer("hidden_size"),
        vocab=whole(fields.integer("vocab_size")),
        norm_eps=norm_eps,
        max_position=max_position,
        tied_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=read_dtype(fields),
        mtp_layers=read_mtp_layers(fields),
        drafting_keys=read_drafting_keys(fields),
        eos_token_ids=read_token_ids(fields, "eos_token_id"),
        layers=tuple(
            LayerSpec(
                index=layer,
                mixer=mixers[kinds.value[layer]],
                feed_forward=moes[hashed.value[layer]],
                sources={"mixer": kinds.source, "feed_forward": hashed.source},
            )
            for layer in range(num_layers)
        ),
        hyper_connections=HyperConnectionsSpec.of(
            streams=fields.integer("hc_mult", maximum=64),
            iterations=fields.integer("hc_sinkhorn_iters", maximum=10_000),
            eps=fields.number("hc_eps", maximum=0.1),
        ),
        storage=read_v4_storage(fields),
        renamed=RENAMED,
    )
    finish(fields)
    return spec


def read_v4_storage(fields: Fields) -> Fact[WeightStorage | None]:
    """fp8 alone does not say how experts and scales are stored."""
    storage = read_storage(fields)
    section = fields.raw.get("quantization_config")
    stated = fields.has("expert_dtype") or (isinstance(section, dict) and "expert_dtype" in section)
    if isinstance(section, dict) and section.get("quant_method") == "fp8" and not stated:
        fields.choice("expert_dtype", STORED_EXPERTS)
    return storage


def read_drafting_keys(fields: Fields) -> Fact[tuple[str, ...]]:
    """Whatever they say: nothing drafts."""
    return formula(
        tuple(key for key in DRAFTING_KEYS if fields.has(key)), "unused: no draft layer is run"
    )


def read_kinds(fields: Fields, num_layers: int) -> Fact[tuple[Kind, ...]]:
    """Flat: a ratio per layer, then one per draft layer. As transformers saves it: the form per
    layer, and a ratio per form."""
    if fields.has("layer_types"):
        return _kinds_by_type(fields, num_layers)

    def is_ratio(value: object) -> TypeGuard[int]:
        return type(value) is int and value in PUBLISHED_RATIOS

    ratios = fields.list_of(
        "compress_ratios",
        is_ratio,
        f"{sorted(PUBLISHED_RATIOS)}, one for each layer and then the draft layers "
        "(other ratios: layer_types and compress_rates)",
        length=None,
    )
    if len(ratios.value) < num_layers:
        fields.refuse("compress_ratios", f"at least num_hidden_layers = {num_layers} entries")
    rates = fields.section("compress_rates")
    if rates is not None:
        for name, form in FORMS.items():
            for ratio in (ratio for ratio, of in PUBLISHED_RATIOS.items() if of == form and ratio):
                rates.must_equal(name, ratio, "as compress_ratios says")
        rates.finish({})
    kinds = tuple((PUBLISHED_RATIOS[ratio], ratio) for ratio in ratios.value[:num_layers])
    return Fact(kinds, ratios.source)


def _kinds_by_type(fields: Fields, num_layers: int) -> Fact[tuple[Kind, ...]]:
    types = read_layer_types(fields, "layer_types", FORMS, num_layers)
    rates = fields.section("compress_rates") or Fields({}, fields.file, "compress_rates.")
    ratio_of = {"sliding_attention": 0}
    for name in FORMS:
        if name in ratio_of:
            continue
        if name in types.value or rates.has(name):
            ratio_of[name] = rates.integer(name, maximum=MAX_RATIO).value
    rates.finish({})
    if fields.has("compress_ratios"):
        ratios = [ratio_of[name] for name in types.value]
        found = fields.raw["compress_ratios"]
        if not isinstance(found, list) or found[:num_layers] != ratios:
            fields.refuse("compress_ratios", f"{ratios}, as layer_types and compress_rates say")
    return Fact(tuple((FORMS[name], ratio_of[name]) for name in types.value), types.source)


def read_ropes(fields: Fields, max_position: Fact[int]) -> tuple[RopeSpec, RopeSpec]:
    """For layers of a window alone (rope_theta, no YaRN) and for those with a compressor."""
    dim = read_rope_dim(fields)
    share = dim.value / fields.integer("head_dim").value
    new = fields.section("rope_parameters", accepts=ROPE_KEYS)
    old = fields.section("rope_scaling", accepts=ROPE_KEYS)
    if new is not None and old is not None:
        fields.refuse("rope_scaling", "only one of rope_parameters and rope_scaling")
    main, scaled = None, new or old
    if new is not None and (new.has("main") or new.has("compress")):
        main, scaled = (_required_section(new, name) for name in ("main", "compress"))
        new.finish({})
    for place in filter(None, (fields, main, scaled)):
        place.must_equal("partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
    base = _read_base(fields, "rope_theta", main)
    compressed_base = _read_base(fields, "compress_rope_theta", scaled)
    if main is not None:
        main.must_equal("rope_type", "default", "window layers have no YaRN")
        main.must_equal("type", "default", "window layers have no YaRN")
        main.finish({})
    yarn: Fact[YarnSpec | None] = default(None, "neither rope_scaling nor rope_parameters")
    if scaled is not None:
        yarn = _read_stated_yarn(scaled, max_position)
    interleaved = default("interleaved", "deepseek_v4 rotates interleaved channels")
    common = {"dim": dim, "pairing": interleaved, "yarn_scales_magnitude": NO_MAGNITUDE}
    window_yarn = formula(None, "deepseek_v4: window layers have none")
    return (
        RopeSpec.of(**common, base=base, yarn=window_yarn),
        RopeSpec.of(**common, base=compressed_base, yarn=yarn),
    )


def read_rope_dim(fields: Fields) -> Fact[int]:
    """transformers keeps the share alone, and writes both."""
    head_dim = fields.integer("head_dim").value
    if fields.has("qk_rope_head_dim") or not fields.has("partial_rotary_factor"):
        dim = fields.integer("qk_rope_head_dim", minimum=2, maximum=head_dim)
        if dim.value % 2:
            fields.refuse("qk_rope_head_dim", "an even number: rotation acts on pairs of channels")
        return dim
    share = fields.number("partial_rotary_factor", maximum=1.0).value
    dim = formula(round(head_dim * share), "head_dim × partial_rotary_factor")
    if dim.value % 2 or dim.value / head_dim != share:
        fields.refuse("partial_rotary_factor", f"an even number / head_dim = {head_dim}")
    return dim


def _required_section(fields: Fields, key: str) -> Fields:
    section = fields.section(key, accepts=ROPE_KEYS)
    if section is None:
        fields.refuse(key, "a JSON object beside the other of main and compress")
    return section


def _read_base(fields: Fields, key: str, section: Fields | None) -> Fact[float]:
    """At the top, in the section of the layers that it is for, or alike in both."""
    if section is None or not section.has("rope_theta"):
        return fields.number(key, above=1.0)
    inside = section.number("rope_theta", above=1.0)
    if not fields.has(key) or fields.raw[key] != CLASS_BASES[key]:
        fields.must_equal(key, section.raw["rope_theta"], f"as '{section.prefix}rope_theta' says")
    return inside


def _read_stated_yarn(section: Fields, max_position: Fact[int]) -> Fact[YarnSpec | None]:
    """Every number that the table depends on must be in the file."""
    section.must_equal("attention_factor", 1.0, "DeepSeek-V4 applies no magnitude")
    if "yarn" in (section.raw.get("rope_type"), section.raw.get("type")):
        section.integer("original_max_position_embeddings")
        for key in ("beta_fast", "beta_slow"):
            section.number(key)
    yarn = read_yarn(section, max_position)
    section.finish({})
    if yarn.value is None:
        return yarn
    # transformers writes the 1.0 that the published form leaves out
    none: dict[str, Any] = {"attention_factor": 1.0, "apply_yarn_scaling": False}
    sources = {**yarn.value.sources, **dict.fromkeys(none, NO_MAGNITUDE.source)}
    return Fact(replace(yarn.value, **none, sources=sources), yarn.source)


def read_mixer(
    fields: Fields, kind: Fact[Kind], rope: RopeSpec, norm_eps: Fact[float]
) -> CompressedSpec:
    fields.must_equal("num_key_value_heads", 1, "one key-value head serves all")
    form, ratio = (Fact(value, kind.source) for value in kind.value)
    head_dim = fields.integer("head_dim")
    heads, groups = fields.integer("num_attention_heads"), fields.integer("o_groups")
    if heads.value % groups.value:
        fields.refuse("o_groups", f"a divisor of num_attention_heads = {heads.value}")
    index_dim = fields.integer("index_head_dim", minimum=rope.dim)
    overlap = formula(form.value == "sparse", "windows of the selected form overlap")
    indexer = EntryIndexerSpec.of(
        heads=fields.integer("index_n_heads"),
        head_dim=index_dim,
        topk=fields.integer("index_topk"),
        compressor=CompressorSpec.of(ratio=ratio, overlap=overlap, dim=index_dim),
    )
    compressor = CompressorSpec.of(ratio=ratio, overlap=overlap, dim=head_dim)
    return CompressedSpec.of(
        heads=whole(heads),
        head_dim=head_dim,
        window=fields.integer("sliding_window"),
        form=form,
        compressor=None if form.value == "window" else compressor,
        indexer=indexer if form.value == "sparse" else None,
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=whole(groups),
        o_lora_rank=fields.integer("o_lora_rank"),
        norm_eps=norm_eps,
        rope=rope,
    )


def read_hashed_layers(fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    if not fields.has("mlp_layer_types"):
        first = fields.integer("num_hash_layers", minimum=0, maximum=num_layers)
        return Fact(tuple(layer < first.value for layer in range(num_layers)), first.source)
    kinds = read_layer_types(fields, "mlp_layer_types", ("hash_moe", "moe"), num_layers)
    hashed = tuple(kind == "hash_moe" for kind in kinds.value)
    if fields.has("num_hash_layers"):
        first = fields.integer("num_hash_layers", minimum=0, maximum=num_layers)
        if hashed != tuple(layer < first.value for layer in range(num_layers)):
            fields.refuse("num_hash_layers", "the layers that mlp_layer_types calls hash_moe")
    return Fact(hashed, kinds.source)


def read_moe(fields: Fields, hashed: bool, source: Source) -> MoESpec:
    experts = fields.integer("n_routed_experts", maximum=MAX_EXPERTS)
    width = fields.integer("moe_intermediate_size")
    fields.must_equal("topk_method", "noaux_tc", "here it means only: bias for selection")
    fields.must_equal("norm_topk_prob", True, "DeepSeek-V4 always renormalises")
    if fields.integer("n_shared_experts", minimum=0).value != 1:
        fields.refuse("n_shared_experts", "1: every layer has one shared expert")
    return MoESpec.of(
        experts=whole(experts),
        expert_width=whole(width),
        shared_width=formula(whole(width).value, "moe_intermediate_size × n_shared_experts"),
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
