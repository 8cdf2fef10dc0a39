"""Tiny models and prompts that make a wrong fact visible: unequal dims, far positions, experts
in groups, every spelling of rope somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.tiny.configs import as_saved, change_config, family_config
from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.tiny.quantise import KIMI_IGNORES
from trueline.utils.json_types import JSON
from trueline.verify.v4_configs import V4, V4_NESTED
from trueline.weights.formats import Storage
from trueline.weights.formats.base_fp8 import BaseFp8
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.fp4 import E8m0BlockFp8, Fp4, Fp4Experts
from trueline.weights.formats.pack_int4 import PackInt4


@dataclass(frozen=True)
class Case:
    family: str
    config: JSON = field(default_factory=dict)
    """All of config.json, instead of the family's tiny one."""
    keys: JSON = field(default_factory=dict)
    """Keys to set in the family's tiny config."""
    absent: tuple[str, ...] = ()
    """Keys to take out of it."""
    rope: JSON = field(default_factory=dict)
    """Keys to set in its rope_scaling."""
    yarn: bool | None = None
    rates: tuple[int, int] | None = None
    """Of DeepSeek-V4 as transformers saves it: positions of an entry, selected and all attended."""
    storage: Storage | None = None
    fused: bool = False
    """Store the experts of a layer in one tensor."""
    dtype: str = "float32"
    mtp: bool = False
    """Store an MTP layer too."""
    spare: bool = False
    """Store indexers of layers that share another's selection too."""
    facts: JSON = field(default_factory=dict)
    """Facts to override."""
    options: JSON = field(default_factory=dict)
    """Options of the engine."""
    seed: int = 0
    start: int = 0
    """Position of the first token."""
    stride: int = 1
    """Distance between positions. Rotation is relative: only far apart do small errors in
    frequencies become large angles."""
    length: int = 48


@dataclass(frozen=True)
class Subject:
    """A case made: what a check works on."""

    name: str
    model: Path
    tokens: Tensor
    positions: Tensor
    facts: JSON = field(default_factory=dict)
    """Facts to override, for both readers."""
    options: JSON = field(default_factory=dict)
    """Options of the engine: what replaces ours."""
    oracle: Tensor | None = None
    """float64 logprobs of an implementation that shares no code with ours."""


_LING, _V32, _GLM5, _V4 = "bailing_moe_v2_5", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"
_FREQUENCY = ("index_topk_freq", "index_skip_topk_offset")
# Rope as transformers saves it, with YaRN inside.
_ROPE_PARAMETERS = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 7.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 0.8,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 96,
}
FP8_32 = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())
FP8_EXEMPT = BlockFp8(
    block=(32, 32),
    power_of_two_scales=True,
    # layer 0 is dense: its gate_proj is quantised, though a name in this list is part of its name
    ignored_modules=("model.layers.0.mlp.gate", "model.layers.0.self_attn.kv_b_proj", "lm_head"),
)
FP8_UE8M0 = BlockFp8(block=(32, 32), power_of_two_scales=True, ignored_modules=())
INT4 = PackInt4(group=32, ignored_modules=KIMI_IGNORES)
# Beside the experts all that a rank cuts: shared experts, the dense MLP, attention. Groups of 8, so
# that widths need no large common divisor.
INT4_ALL = PackInt4(group=8, ignored_modules=("lm_head", r"re:.*\.layers\.1\.self_attn\.o_proj"))
FP4 = Fp4Experts(
    routed=Fp4(ignored_modules=()),
    others=E8m0BlockFp8(block=(32, 32), power_of_two_scales=True, ignored_modules=()),
)
# As the checkpoints of a Base model are stored.
BASE_FP8 = BaseFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())
# Widths of experts in whole groups.
_GROUPED: JSON = {"hidden_size": 96, "moe_intermediate_size": 64}
_V4_STORED: JSON = _GROUPED | {"num_hidden_layers": 4}
# Groups of 128 inputs, the last ones partial.
_FP8_INPUTS: JSON = {
    "hidden_size": 160,
    "intermediate_size": 200,
    "moe_intermediate_size": 144,
    "num_hidden_layers": 2,
}
_ACTIVATIONS: JSON = {"numerics": "activations"}
_GROUPED_ALL: JSON = {
    "hidden_size": 80,
    "moe_intermediate_size": 24,
    "intermediate_size": 72,
    "kv_lora_rank": 40,
    "v_head_dim": 12,
    "q_lora_rank": 48,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
}

# Eight ranks divide all of it; blocks of 32 begin inside of a rank's part, of two and of eight.
_RANKED: JSON = {
    "hidden_size": 80,
    "intermediate_size": 88,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "vocab_size": 312,
}
_LING_RANKED: JSON = _RANKED | {
    "group_norm_size": 8,
    "moe_shared_expert_intermediate_size": 40,
}
_V4_RANKED: JSON = {key: _RANKED[key] for key in _RANKED if key != "intermediate_size"} | {
    "num_attention_heads": 16,
    "o_groups": 8,
    "num_hidden_layers": 4,
}
# Two groups of channels that do not rotate, the second one partial; index rows of two groups.
_V4_ROUNDED: JSON = _V4_RANKED | {"head_dim": 90, "index_head_dim": 64}
# 48, 24 and 12 columns of an expert on two, four and eight ranks: inside of groups of 32, and of
# words.
_INT4_RANKED: JSON = _RANKED | {"hidden_size": 96, "moe_intermediate_size": 96}

# For checks whose kernels are interpreted where there is no GPU.
_SHALLOW = {"num_hidden_layers": 2}

CASES: Mapping[str, Case] = {
    "v2": Case("deepseek_v2", start=5000, stride=131),
    "v2-lite": Case("deepseek_v2_lite", yarn=False),
    "v3": Case("deepseek_v3", start=4321, stride=173),
    "v3-near": Case("deepseek_v3"),
    "v3-fp8-cache": Case(
        "deepseek_v3", options={"kv_cache_dtype": "fp8", "kv_cache_group_size": 16}
    ),
    "v3-shallow": Case("deepseek_v3", keys=_SHALLOW),
    "v3-rope-parameters": Case(
        "deepseek_v3",
        keys={"rope_parameters": _ROPE_PARAMETERS},
        absent=("rope_scaling", "rope_theta"),
        start=300,
        facts={"latent_norm_eps": 1e-4},
    ),
    "v3-mixed-spelling": Case(
        "deepseek_v3",
        absent=("rope_scaling",),
        keys={
            "rope_theta": 500.0,
            "rope_parameters": {"type": "yarn", "factor": 3.0, "mscale_all_dim": 0.6},
        },
    ),
    "v3-half-split": Case("deepseek_v3", keys={"rope_interleave": False}),
    "v3-attention-factor": Case("deepseek_v3", rope={"attention_factor": 1.2}),
    "v3-no-yarn-scaling": Case("deepseek_v3", rope={"apply_yarn_scaling": False}),
    "v3-no-truncate": Case("deepseek_v3", rope={"truncate": False}),
    "v3-ranks": Case("deepseek_v3", keys=_RANKED),
    "v3-ranks-fused": Case("deepseek_v3", keys=_RANKED, fused=True),
    "v3-one-head": Case("deepseek_v3", keys=_RANKED | {"num_attention_heads": 1}),
    "v3-mtp": Case("deepseek_v3", keys={"num_nextn_predict_layers": 1}, mtp=True),
    "k2": Case("kimi_k2", start=900, stride=97),
    "k25": Case("kimi_k25"),
    "glm": Case("glm4_moe_lite", start=2000),
    "tied": Case("deepseek_v2", keys={"tie_word_embeddings": True}),
    "bf16": Case("deepseek_v3", dtype="bfloat16"),
    "fp8": Case("deepseek_v3", storage=FP8_32),
    "fp8-ranks": Case("deepseek_v3", keys=_RANKED, storage=FP8_32),
    "fp8-exempt": Case("deepseek_v3", storage=FP8_EXEMPT),
    "fp8-inputs": Case("deepseek_v3", keys=_FP8_INPUTS, storage=FP8_32, options=_ACTIVATIONS),
    "fp8-inputs-ue8m0": Case(
        "deepseek_v3", keys=_FP8_INPUTS, storage=FP8_UE8M0, options=_ACTIVATIONS
    ),
    "fp8-inputs-exempt": Case(
        "deepseek_v3",
        keys=_FP8_INPUTS,
        storage=replace(FP8_32, ignored_modules=("q_a_proj",)),
        options=_ACTIVATIONS,
    ),
    "int4": Case("kimi_k2", keys=_GROUPED, storage=INT4, dtype="bfloat16"),
    "int4-ranks": Case("kimi_k2", keys=_INT4_RANKED, storage=INT4),
    "int4-all": Case("kimi_k2", keys=_GROUPED_ALL, storage=INT4_ALL),
    "k25-int4": Case("kimi_k25", keys=_GROUPED, storage=INT4),
    "fp4": Case("deepseek_v3", keys=_GROUPED, storage=FP4),
    "ling": Case(_LING),
    "ling-ranks": Case(_LING, keys=_LING_RANKED),
    "ling-shallow": Case(_LING, keys=_SHALLOW | {"layer_group_size": 2}),
    "ling-far": Case(_LING, start=4321, stride=173),
    "ling-one-group": Case(_LING, keys={"group_norm_size": 1, "q_lora_rank": None}),
    "ling-silu": Case(_LING, keys={"linear_silu": True, "use_qk_norm": False}),
    "ling-unrotated": Case(_LING, keys={"linear_rope": False}),
    "ling-yarn": Case(_LING, yarn=True, start=2000, stride=97),
    "ling-rope-parameters": Case(
        _LING,
        keys={"rope_parameters": _ROPE_PARAMETERS | {"partial_rotary_factor": 0.4}},
        absent=("rope_scaling", "rope_theta", "partial_rotary_factor"),
    ),
    "ling-no-tail": Case(_LING, keys={"num_hidden_layers": 4, "layer_group_size": 4}),
    "ling-mtp": Case(_LING, keys={"num_nextn_predict_layers": 1}, mtp=True),
    "ling-l-1": Case(_LING, facts={"linear_layer_factor": "l-1"}),
    "ling-norm-head": Case(_LING, keys={"norm_head": True}),
    # few layers: small embeddings make float32 noise large
    "ling-tied": Case(_LING, keys={"tie_word_embeddings": True, "num_hidden_layers": 4}, seed=3),
    "ling-bf16": Case(_LING, dtype="bfloat16"),
    "ling-fp8": Case(_LING, storage=FP8_32),
    "v4": Case(_V4, config=V4),
    "v4-nested": Case(_V4, config=V4_NESTED),
    "v4-flat": Case(_V4, keys={"num_hidden_layers": 4}, length=300),
    "v4-small": Case(_V4, rates=(4, 8)),
    "v4-odd": Case(_V4, rates=(3, 5)),
    "v4-rounded": Case(_V4, keys=_V4_ROUNDED, rates=(4, 8), options={"numerics": "published"}),
    "v4-shallow": Case(_V4, keys={"num_hidden_layers": 4}, rates=(4, 8)),
    "v4-fp4": Case(_V4, keys=_V4_STORED, rates=(4, 8), storage=FP4),
    "v4-base-fp8": Case(_V4, keys=_V4_STORED, rates=(4, 8), storage=BASE_FP8),
    "v4-ranks": Case(_V4, keys=_V4_RANKED, rates=(4, 8)),
    "v32": Case(_V32, start=4321, stride=173),
    "v32-near": Case(_V32),
    "v32-block-1": Case(_V32, options={"block_size": 1, "index_cache_dtype": "e4m3fn"}),
    "v32-shallow": Case(_V32, keys=_SHALLOW),
    "v32-plain": Case(_V32, yarn=False),
    "v32-interleaved": Case(_V32, keys={"indexer_rope_interleave": True}),
    "v32-all-keys": Case(_V32, keys={"index_topk": 48}),
    "v32-more-than-all": Case(_V32, keys={"index_topk": 61}),
    "v32-ties": Case(_V32, keys={"index_n_heads": 2}),
    "v32-rope-parameters": Case(
        _V32,
        keys={"rope_parameters": _ROPE_PARAMETERS},
        absent=("rope_scaling", "rope_theta"),
        start=300,
        facts={"latent_norm_eps": 1e-4},
    ),
    "v32-attention-factor": Case(_V32, rope={"attention_factor": 1.2}),
    "v32-mtp": Case(_V32, keys={"num_nextn_predict_layers": 1}, mtp=True),
    "v32-bf16": Case(_V32, dtype="bfloat16"),
    "v32-fp8": Case(_V32, storage=FP8_32),
    "glm5": Case(_GLM5, start=2000),
    "glm5-far": Case(_GLM5, start=4321, stride=173),
    "glm5-all-full": Case(_GLM5, absent=_FREQUENCY),
    "glm5-types": Case(_GLM5, keys={"indexer_types": ["full", "shared"] * 3}, absent=_FREQUENCY),
    "glm5-pattern": Case(_GLM5, keys={"index_topk_pattern": "FSSFSF"}, absent=_FREQUENCY),
    "glm5-offset": Case(_GLM5, absent=("index_skip_topk_offset",), keys={"index_topk_freq": 2}),
    "glm5-half-split": Case(_GLM5, keys={"indexer_rope_interleave": False}),
    "glm5-saved": Case(
        _GLM5,
        keys={
            "head_dim": 10,
            "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
            "layer_types": ["indexed_attention"] * 6,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"],
            "qk_head_dim": 21,
        },
        absent=("indexer_rope_interleave", "first_k_dense_replace"),
    ),
    "glm5-more-than-all": Case(_GLM5, keys={"index_topk": 61}),
    "glm5-yarn": Case(_GLM5, yarn=True, start=2000, stride=97),
    "glm5-mtp": Case(_GLM5, keys={"num_nextn_predict_layers": 1}, mtp=True),
    "glm5-spare": Case(_GLM5, spare=True),
    "glm5-bf16": Case(_GLM5, dtype="bfloat16"),
    "glm5-fp8": Case(_GLM5, storage=FP8_32),
}


def make_subject(name: str, directory: Path) -> Subject:
    """Write the case's model into `directory`, and draw its prompt."""
    case = CASES[name]
    config = dict(case.config) or family_config(case.family)
    change_config(
        config, {**case.keys, "torch_dtype": case.dtype}, yarn=case.yarn, storage=case.storage
    )
    # nobody's default, and so large that they show beside what they are added to
    config.get("text_config", config)["rms_norm_eps"] = 3e-3
    for key in case.absent:
        del config[key]
    if case.rope:
        config["rope_scaling"].update(case.rope)
    if case.family == _V4 and not case.config:
        config["hc_sinkhorn_iters"] = 3  # so few that one more or less shows
        config["hc_eps"] = 2e-2
    if case.rates:
        config = as_saved(config, *case.rates)
    options = TinyOptions(seed=case.seed, dtype=case.dtype, fused_experts=case.fused)
    spec = make_checkpoint(directory, config, options)
    if case.mtp:
        _add_mtp_layer(directory, spec)
    if case.spare:
        _add_spare_indexers(directory, spec)
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(spec.vocab.total, (case.length,), generator=generator)
    positions = case.start + case.stride * torch.arange(case.length)
    return Subject(name, directory, tokens, positions, case.facts, case.options)


def _add_mtp_layer(directory: Path, spec: ModelSpec) -> None:
    """Names and shapes of a draft layer, as published after the last layer."""
    last = replace(spec.layers[-1], index=spec.num_layers)
    if spec.family == _GLM5:  # it has an indexer of its own, as the first layer has
        last = replace(last, mixer=spec.layers[0].mixer)
    D, vocab, at = spec.hidden_size, spec.vocab.total, f"model.layers.{last.index}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.enorm.weight": (D,),
        f"{at}.hnorm.weight": (D,),
        f"{at}.eh_proj.weight": (D, 2 * D),
    }
    if spec.family == _LING:  # its head and embedding are the model's own
        shapes[f"{at}.final_layernorm.weight"] = (D,)
    else:
        shapes[f"{at}.shared_head.norm.weight"] = (D,)
        shapes[f"{at}.shared_head.head.weight"] = shapes[f"{at}.embed_tokens.weight"] = (vocab, D)
    for parameter in parameters(replace(spec, layers=(last,))):
        shapes |= {p.source: p.shape for p in parameter.pieces if p.source.startswith(f"{at}.")}
    tensors = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    save_file(tensors, directory / "mtp.safetensors")


def _add_spare_indexers(directory: Path, spec: ModelSpec) -> None:
    """What some checkpoints hold though no layer would read it."""
    owner = spec.layers[0]
    shared = (layer for layer in spec.layers if layer.mixer != owner.mixer)
    tensors = {
        piece.source: torch.full(piece.shape, float("nan"))
        for layer in shared
        for parameter in parameters(replace(spec, layers=(replace(layer, mixer=owner.mixer),)))
        for piece in parameter.pieces
        if ".indexer." in piece.source
    }
    save_file(tensors, directory / "spare.safetensors")
