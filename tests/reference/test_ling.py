"""BailingMoeV2.5 (Ling 2.5 and 2.6): its facts, its names, and both forms of its linear layers.

transformers has no class for it (its bailing_hybrid is Ling 3), so nothing here is compared with
transformers; the sum written out in `verify/lightning.py` stands in.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import published
from trueline import reference
from trueline.cli import main
from trueline.errors import CheckpointError, ConfigError, UsageError
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.models.statistics import cache_costs, count_parameters
from trueline.reference import config as second_opinion
from trueline.reference import lightning
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.mixer import LightningSpec, MLASpec, head_slopes
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec, whole_spec
from trueline.tiny.configs import family_config
from trueline.verify.cases import CASES, make_subject
from trueline.verify.checks import CHECKS
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.ledger import balance
from trueline.weights.load import load_weights

Tiny = Callable[..., Path]
WriteConfig = Callable[[dict[str, Any]], Path]
FLASH = published.LING_2_6_FLASH
FAMILY = "bailing_moe_v2_5"
YARN = published.yarn(factor=4.0, mscale=0.8, mscale_all_dim=0.6)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def linear(spec: ModelSpec, layer: int = 0) -> LightningSpec:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, LightningSpec)
    return mixer


def latent(spec: ModelSpec) -> MLASpec:
    mixer = spec.layers[-1].mixer
    assert isinstance(mixer, MLASpec)
    return mixer


def latent_layers(spec: ModelSpec) -> list[int]:
    return [layer.index for layer in spec.layers if isinstance(layer.mixer, MLASpec)]


# -- facts -----------------------------------------------------------------------------


def test_flash(write_config: WriteConfig) -> None:
    spec = read_model(write_config(FLASH))
    assert spec.family == FAMILY
    assert spec.sources["family"].text == "architectures"
    assert latent_layers(spec) == [7, 15, 23, 31]
    assert isinstance(spec.layers[0].feed_forward, DenseSpec)
    moe = spec.layers[1].feed_forward
    assert isinstance(moe, MoESpec)
    assert (moe.experts.total, moe.router.top_k, moe.router.num_groups) == (256, 8, 8)
    assert (moe.router.scoring, moe.router.group_score) == ("sigmoid", "top2_sum")
    assert moe.router.renormalise
    assert moe.router.correction_bias
    assert latent(spec).softmax_scale == pytest.approx(0.0721688, abs=6e-8)
    first = linear(spec)
    assert (first.heads.total, first.head_dim, first.norm_groups.total) == (32, 128, 4)
    assert first.scale == pytest.approx(128**-0.5)
    assert (first.qk_norm, first.silu) == (True, False)


def test_rotations_are_two(write_config: WriteConfig) -> None:
    """Story 1: the factor is the linear layers' own; in the released files both give 64."""
    for factor, dim in ((0.5, 64), (0.25, 32), (1.0, 128)):
        spec = read_model(write_config(FLASH | {"partial_rotary_factor": factor}))
        assert (latent(spec).rope.dim, latent(spec).rope.pairing) == (64, "interleaved")
        rope = linear(spec).rope
        assert rope is not None
        assert (rope.dim, rope.pairing) == (dim, "half-split")
    assert linear(read_model(write_config(FLASH | {"linear_rope": False}))).rope is None


def test_yarn_runs_over_each_width(write_config: WriteConfig) -> None:
    spec = read_model(write_config(FLASH | {"partial_rotary_factor": 0.25, "rope_scaling": YARN}))
    rope, own = latent(spec).rope, linear(spec).rope
    assert own is not None
    assert rope.yarn == own.yarn
    assert rope.cos_sin_scale == own.cos_sin_scale != 1.0
    assert len(own.exponents) == 16
    # mscale² belongs to the softmax, and linear layers have none
    assert latent(spec).softmax_scale == pytest.approx(192**-0.5 * rope.score_scale)
    assert linear(spec).scale == 128**-0.5


def test_slopes(write_config: WriteConfig) -> None:
    spec = read_model(write_config(FLASH))
    assert head_slopes(32)[0] == pytest.approx(0.8408964)
    assert head_slopes(32)[-1] == 0.00390625
    assert linear(spec, 0).slopes[0] == pytest.approx(0.8408964 * 1.00001)
    # the layer's own number, linear or not: 8 follows a latent layer
    assert linear(spec, 8).slopes[-1] == pytest.approx(0.00390625 * (1 - 8 / 31 + 1e-5))
    other = read_model(write_config(FLASH), {"linear_layer_factor": "l-1"})
    assert linear(other, 0).slopes[-1] == pytest.approx(0.00390625 * (1 + 1 / 31 + 1e-5))
    assert linear(other).sources["linear_layer_factor"].kind == "override"
    assert linear(spec).sources["linear_layer_factor"].kind == "default"


@pytest.mark.parametrize("heads", range(1, 41))
def test_slopes_of_any_number_of_heads(heads: int) -> None:
    power = 1 << (heads.bit_length() - 1)
    wanted = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    double = [2.0 ** (-8 * (h + 1) / (2 * power)) for h in range(2 * power)]
    assert head_slopes(heads) == tuple(wanted + double[0::2][: heads - power])


def test_layer_kinds(write_config: WriteConfig) -> None:
    def kinds(layers: int, group: int) -> list[int]:
        keys = {"num_hidden_layers": layers, "layer_group_size": group}
        file = write_config(FLASH | keys)
        config = second_opinion.read_config(file)
        theirs = [n for n in range(layers) if not second_opinion.layer_is_linear(config, n)]
        assert latent_layers(read_model(file)) == theirs
        return theirs

    assert kinds(12, 4) == [3, 7, 11]
    assert kinds(7, 3) == [2, 5, 6]
    assert kinds(11, 4) == [3, 7, 8, 9, 10]
    assert kinds(5, 1) == [0, 1, 2, 3, 4]
    assert kinds(3, 4) == [0, 1, 2]


SPELLINGS: dict[str, dict[str, Any]] = {
    "use_linear_silu": without(FLASH, "linear_silu") | {"use_linear_silu": False},
    "both silus": FLASH | {"use_linear_silu": False},
    "no silu": without(FLASH, "linear_silu"),
    "linear_rope": FLASH | {"linear_rope": True},
    "factor in rope_parameters": without(FLASH, "partial_rotary_factor", "rope_scaling")
    | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "factor twice": FLASH
    | {"rope_scaling": None, "rope_parameters": {"type": "default", "partial_rotary_factor": 0.5}},
    "as many key heads": FLASH | {"num_key_value_heads": 32},
    "norm_head false": FLASH | {"norm_head": False},
    "rotary_dim": FLASH | {"rotary_dim": 64},
    "no shared width": without(FLASH, "moe_shared_expert_intermediate_size"),
    "no methods": without(FLASH, "scoring_func", "topk_method", "score_function", "norm_topk_prob"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_gives_the_same_model(name: str, write_config: WriteConfig) -> None:
    file = write_config(SPELLINGS[name])
    config = second_opinion.read_config(file)
    assert read_model(file) == read_model(write_config(FLASH))
    assert config == second_opinion.read_config(write_config(FLASH))


LING_3 = {"kda_safe_gate": True, "short_conv_kernel_size": 4, "no_kda_lora": True}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Ling 3 in transformers": (
        FLASH | {"architectures": ["BailingHybridForCausalLM"]},
        ["'architectures': found [\"BailingHybridForCausalLM\"]", "Ling 3"],
    ),
    "Ling 3 as published": (
        FLASH | LING_3 | {"architectures": ["BailingMoeV3ForCausalLM"]},
        ["BailingMoeV3ForCausalLM", "Ling 3"],
    ),
    "two architectures": (
        FLASH | {"architectures": [*FLASH["architectures"], "BailingMoeV3ForCausalLM"]},
        ["'architectures'"],
    ),
    "no architecture": (
        without(FLASH, "architectures"),
        ["'architectures': found null", "BailingMoeV2_5ForCausalLM", "Ling 3"],
    ),
    **{
        f"Ling 3's {key}": (FLASH | {key: value}, [f"'{key}'", "a key of Ling 3"])
        for key, value in LING_3.items()
    },
    "half-split": (
        FLASH | {"rope_interleave": False},
        ["'rope_interleave': found false", "interleaved"],
    ),
    "not renormalised": (FLASH | {"norm_topk_prob": False}, ["'norm_topk_prob'", "renormalises"]),
    "one expert": (FLASH | {"num_experts_per_tok": 1}, ["'num_experts_per_tok'", "from 2"]),
    "router in bfloat16": (FLASH | {"router_dtype": "bf16"}, ["'router_dtype'", "fp32"]),
    "no expert bias": (
        FLASH | {"moe_router_enable_expert_bias": False},
        ["'moe_router_enable_expert_bias'"],
    ),
    "softmax": (FLASH | {"score_function": "softmax"}, ["'score_function'", '"sigmoid"']),
    "bias": (FLASH | {"use_bias": True}, ["'use_bias': found true", "sources disagree"]),
    "qkv bias": (FLASH | {"use_qkv_bias": True}, ["'use_qkv_bias': found true"]),
    "silus differ": (FLASH | {"use_linear_silu": True}, ["'use_linear_silu'", "linear_silu"]),
    "factors differ": (
        FLASH | {"rope_parameters": {"type": "default", "partial_rotary_factor": 0.25}},
        ["'partial_rotary_factor': found 0.5", "0.25"],
    ),
    "no factor": (without(FLASH, "partial_rotary_factor"), ["'partial_rotary_factor' is missing"]),
    "odd width": (
        FLASH | {"partial_rotary_factor": 0.3},
        ["'partial_rotary_factor': found 0.3", "even number of channels"],
    ),
    "no head_dim": (without(FLASH, "head_dim"), ["'head_dim' is missing"]),
    "no qk norm": (without(FLASH, "use_qk_norm"), ["'use_qk_norm' is missing"]),
    "groups do not divide": (FLASH | {"group_norm_size": 3}, ["'group_norm_size': found 3"]),
    "normed and tied": (
        FLASH | {"norm_head": True, "tie_word_embeddings": True},
        ["'norm_head'", "tie_word_embeddings"],
    ),
    "unread": (FLASH | {"layer_groups": 8}, ["nobody reads 'layer_groups'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, write_config: WriteConfig) -> None:
    config, parts = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        read_model(write_config(config))
    for part in ("config.json", *parts):
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["Ling 3 in transformers", "Ling 3 as published", "no architecture", "half-split", "bias",
     "not renormalised", "router in bfloat16", "no expert bias", "softmax", "no factor"],
)  # fmt: skip
def test_the_reference_refuses_too(name: str, write_config: WriteConfig) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        second_opinion.read_config(write_config(REFUSED[name][0]))


def test_bad_overrides(write_config: WriteConfig) -> None:
    file = write_config(FLASH)
    for value in ("l+1", 1.0, None):
        with pytest.raises(ConfigError, match='accepted: "l" or "l-1"'):
            read_model(file, {"linear_layer_factor": value})
    with pytest.raises(ConfigError, match="'l', 'l-1'"):
        second_opinion.read_config(file, linear_layer_factor="l+1")
    with pytest.raises(ConfigError, match="accepted: latent_norm_eps, linear_layer_factor"):
        read_model(file, {"layer_factor": "l"})
    with pytest.raises(ConfigError, match="no meaning for deepseek_v3"):
        read_model(write_config(published.V3), {"linear_layer_factor": "l"})
    # both facts at once
    spec = read_model(write_config(FLASH), {"latent_norm_eps": 1e-5, "linear_layer_factor": "l-1"})
    assert latent(spec).latent_norm_eps == 1e-5


# -- sizes and what inspect says -------------------------------------------------------


def test_state_and_cache(write_config: WriteConfig) -> None:
    mla, state = cache_costs(read_model(write_config(FLASH)))
    assert (mla.kind, mla.layers, mla.bytes_per_token) == ("mla", 4, 4 * 576 * 2)
    assert mla.state_bytes_per_sequence == 0
    # float32, though the model is bfloat16
    assert (state.kind, state.layers, state.bytes_per_token) == ("lightning", 28, 0)
    assert state.state_bytes_per_sequence == 28 * 32 * 128 * 128 * 4


def test_parameters_are_counted(write_config: WriteConfig) -> None:
    """By hand, from the shapes."""
    spec = read_model(write_config(FLASH))
    D, latents = 4096, 1536 + 512 + 64
    mla = D * latents + 1536 + 512 + 1536 * 32 * 192 + 512 * 32 * 256 + 32 * 128 * D
    lightning_layer = (3 + 1 + 1) * 32 * 128 * D + 32 * 128 + 2 * 128
    moe = 257 * 3 * D * 1024 + 256 * D + 256
    total = 4 * mla + 28 * lightning_layer + 31 * moe + 3 * D * 9216 + 65 * D + 2 * 157184 * D
    assert count_parameters(spec).total == total


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return int(caught.value.code or 0), out.out, out.err


def test_inspect_shows_the_slopes_fact(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(FLASH)
    code, out, _ = run(capsys, "inspect", file)
    assert code == 0
    assert re.search(r"linear_layer_factor +l +default: serving engines' value", out)
    assert "per token (lightning" not in out
    # one entry for all 28 linear layers, whatever their slopes
    kinds = json.loads(run(capsys, "inspect", file, "--json")[1])["layer_kinds"]
    assert [len(kind["layers"]) for kind in kinds] == [1, 27, 4]
    assert out.count("linear attention (lightning)") == 1
    assert "layers 0-6, 8-14, 16-22, 24-30" in out
    assert re.search(r"state per sequence \(lightning, 28 layers, float32\) +5[68]\.\d MB", out)
    _, out, _ = run(capsys, "inspect", file, "--fact", "linear_layer_factor=l-1")
    assert re.search(r"linear_layer_factor +l-1 +override", out)
    assert re.search(r"factor_ends +1\.032268, 0\.03226", out)
    code, _, err = run(capsys, "inspect", file, "--fact", "linear_layer_factor=x")
    assert code == 2
    assert '"l" or "l-1"' in err


def test_score_takes_the_fact(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny(FAMILY)
    flags = ("--tokens", "1,2,3", "--json")
    said = {}
    for factor in ("l", "l-1"):
        stated = f"linear_layer_factor={factor}"
        report = json.loads(run(capsys, "score", model, *flags, "--fact", stated)[1])
        said[factor] = report["logprob"]
        exact = reference.load(model, linear_layer_factor=factor).logprobs([1, 2, 3])
        assert report["logprob"] == pytest.approx(float(exact[0, 2] + exact[1, 3]), abs=1e-12)
    assert abs(said["l"] - said["l-1"]) > 1e-3


def test_a_wrong_value_of_a_fact_is_refused(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    fact = ("--fact", "linear_layer_factor=x")
    code, _, err = run(capsys, "generate", tiny(FAMILY), "--prompt", "x", *fact)
    assert code == 2
    assert '"l" or "l-1"' in err


# -- weights ---------------------------------------------------------------------------


def test_published_names(tiny: Tiny) -> None:
    stored = load_file(tiny(FAMILY) / "model.safetensors")
    for name, shape in {
        "model.word_embeddings.weight": (311, 78),
        "lm_head.weight": (311, 78),
        "model.layers.0.attention.query_key_value.weight": (3 * 6 * 20, 78),
        "model.layers.0.attention.query_layernorm.weight": (20,),
        "model.layers.0.attention.key_layernorm.weight": (20,),
        "model.layers.0.attention.g_proj.weight": (6 * 20, 78),
        "model.layers.0.attention.g_norm.weight": (6 * 20,),
        "model.layers.0.attention.dense.weight": (78, 6 * 20),
        "model.layers.2.attention.q_a_proj.weight": (29, 78),
        "model.layers.2.attention.kv_a_proj_with_mqa.weight": (47, 78),
        "model.layers.2.attention.dense.weight": (78, 66),
        "model.layers.2.mlp.gate.expert_bias": (12,),
        "model.layers.2.mlp.shared_experts.up_proj.weight": (28, 78),
    }.items():
        assert stored[name].shape == shape, name
    assert not any("self_attn" in name or "embed_tokens" in name for name in stored)


def test_other_families_names_are_not_taken(tiny: Tiny, tmp_path: Path) -> None:
    """What a parameter is called inside is no name for a file."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny(FAMILY), copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors.pop("model.word_embeddings.weight")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model\.word_embeddings\.weight"):
        load_weights(copy, read_model(copy), dtype=torch.float32)


RANKED = {"num_attention_heads": 12, "moe_intermediate_size": 24}
FP8 = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fp8", [None, FP8])
def test_ranks_hold_the_whole_between_them(size: int, fp8: BlockFp8 | None, tiny: Tiny) -> None:
    model = tiny(FAMILY, keys=RANKED, storage=fp8)
    spec = read_model(model)
    whole = load_weights(model, spec, dtype=torch.float32)
    ranks = [local_spec(spec, rank, size) for rank in range(size)]
    parts = [load_weights(model, rank, dtype=torch.float32) for rank in ranks]
    for rank, part in zip(ranks, parts, strict=True):
        assert {p.name: p.shape for p in parameters(rank)} == {
            name: tuple(value.shape) for name, value in part.items()
        }
    at = "model.layers.0.self_attn"
    runs = [part[f"{at}.query_key_value.weight"].chunk(3) for part in parts]
    together = torch.cat([torch.cat(each) for each in zip(*runs, strict=True)])
    assert torch.equal(together, whole[f"{at}.query_key_value.weight"])
    for name, dim in (("g_proj", 0), ("g_norm", 0), ("o_proj", 1)):
        pieces = [part[f"{at}.{name}.weight"] for part in parts]
        assert torch.equal(torch.cat(pieces, dim), whole[f"{at}.{name}.weight"])
    for name in ("query_layernorm", "key_layernorm"):
        assert all(
            torch.equal(part[f"{at}.{name}.weight"], whole[f"{at}.{name}.weight"]) for part in parts
        )


def test_a_rank_has_its_own_slopes(tiny: Tiny) -> None:
    spec = read_model(tiny(FAMILY, keys=RANKED))
    ranks = [local_spec(spec, rank, 4) for rank in range(4)]
    for layer in (0, 4):
        joined = [slope for rank in ranks for slope in linear(rank, layer).slopes]
        assert tuple(joined) == linear(spec, layer).slopes
        assert len(set(joined)) == 12
    for rank in ranks:
        assert linear(rank).norm_groups.count == 1
        assert linear(rank).cache_fields[0].width == 3 * 20 * 20
        assert whole_spec(rank) == spec
    with pytest.raises(UsageError, match=r"attention heads = 12 .* size 8"):
        local_spec(spec, 0, 8)
    with pytest.raises(UsageError, match=r"groups of the output norm = 4 .* size 3"):
        local_spec(spec, 0, 3)


def test_norm_head_is_of_columns_over_all_words(tiny: Tiny) -> None:
    keys = {"norm_head": True, "vocab_size": 312, "moe_intermediate_size": 24}
    model = tiny(FAMILY, keys=keys)
    spec = read_model(model)
    assert spec.norm_head
    head = load_weights(model, spec, dtype=torch.float32)["lm_head.weight"]
    stored = load_file(model / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(head.norm(dim=0), torch.ones(78))
    torch.testing.assert_close(head, stored / stored.norm(dim=0))
    # a rank's words keep the length of the whole column
    halves = [
        load_weights(model, local_spec(spec, rank, 2), dtype=torch.float32)["lm_head.weight"]
        for rank in range(2)
    ]
    assert torch.equal(torch.cat(halves), head)


def test_mtp_layer_is_unused_by_choice(tmp_path: Path) -> None:
    subject = make_subject("ling-mtp", tmp_path / "mtp")
    checkpoint = open_checkpoint(subject.model)
    assert checkpoint is not None
    (unused,) = balance(checkpoint, read_model(subject.model)).unused.values()
    names = {tensor.name.removeprefix("model.layers.7.") for tensor in unused}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"} <= names
    assert {"attention.kv_b_proj.weight", "attention.dense.weight"} <= names
    assert not any("query_key_value" in name or "head" in name for name in names)


# -- the linear layer ------------------------------------------------------------------

SUMMED = [
    name
    for name, case in CASES.items()
    if name.startswith("ling") and case.yarn is None and case.storage is None
    if "rope_parameters" not in case.keys
]


@pytest.mark.parametrize("name", SUMMED)
def test_both_forms_equal_the_sum(name: str, tmp_path: Path) -> None:
    CHECKS["linear = sum"](make_subject(name, tmp_path / name))


def test_a_rank_needs_whole_groups(tmp_path: Path) -> None:
    CHECKS["ranks = whole"](make_subject("ling", tmp_path / "four"))
    with pytest.raises(UsageError, match="groups of the output norm = 1"):
        CHECKS["ranks = whole"](make_subject("ling-one-group", tmp_path / "one"))


@pytest.mark.parametrize("tile", [1, 2, 7, 64, 300, 1000])
@pytest.mark.parametrize("strength", [1e-6, 0.01, 0.84, 5.0, 50.0])
def test_tiles_of_any_size_under_any_decay(tile: int, strength: float) -> None:
    """exp(-50 × 299) is 0 in every dtype, and exp(+50 × 299) is no number: neither may matter."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 300, d, generator=generator).double() for d in (5, 5, 7))
    slopes = torch.tensor([strength, strength / 3, strength / 17], dtype=torch.float64)
    wanted = lightning.attend_recurrent(q, k, v, slopes)
    got = lightning.attend_tiled(q, k, v, slopes, tile)
    off = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert off.max() <= 1e-12
    again = lightning.attend_tiled(q.float(), k.float(), v.float(), slopes.float(), tile)
    assert bool(torch.isfinite(again).all())


def test_a_token_sees_itself_and_its_past() -> None:
    """One head, one channel, by hand: 1 at every place, decayed by half a token."""
    ones = torch.ones(1, 4, 1, dtype=torch.float64)
    slopes = torch.tensor([math.log(2)], dtype=torch.float64)
    for run_form in (lightning.attend_recurrent, lightning.attend_tiled):
        assert run_form(ones, ones, ones, slopes).flatten().tolist() == pytest.approx(
            [1, 1.5, 1.75, 1.875], rel=1e-15
        )


def test_gradients_flow(tiny: Tiny) -> None:
    model = reference.load(tiny(FAMILY))
    weight = model.params["model.layers.0.self_attn.query_key_value.weight"].requires_grad_()
    model.logprobs([1, 2, 3, 4])[-1, 5].backward()
    assert weight.grad is not None
    assert bool((weight.grad.abs().sum(1) > 0).all())


def test_tiny_config_is_what_it_should_be() -> None:
    """Dims that would hide a mistake if they were equal are not."""
    config = family_config(FAMILY)
    heads, d = config["num_attention_heads"], config["head_dim"]
    assert heads & (heads - 1)
    assert d * config["partial_rotary_factor"] != config["qk_rope_head_dim"]
    assert heads * d // config["group_norm_size"] % d
    assert config["num_hidden_layers"] % config["layer_group_size"]
