"""DeepSeek-V3.2 and GLM-5: the facts of their indexers and their weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import published
from trueline import reference
from trueline.cli import main
from trueline.errors import CheckpointError, ConfigError
from trueline.models import read_model
from trueline.reference import config as second_opinion
from trueline.spec.mixer import IndexerSpec, MLASpec
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec, whole_spec
from trueline.verify.cases import Subject, make_subject
from trueline.verify.checks import CHECKS
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.ledger import balance
from trueline.weights.load import load_weights

Tiny = Callable[..., Path]
WriteConfig = Callable[[dict[str, Any]], Path]
V32, GLM, GLM_52 = published.V32, published.GLM_5, published.GLM_5_2
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
FP8_128 = BlockFp8(block=(128, 128), power_of_two_scales=False, ignored_modules=())


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def index_of(spec: ModelSpec, layer: int = 0) -> IndexerSpec:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, MLASpec)
    assert mixer.indexer is not None
    return mixer.indexer


def full_layers(spec: ModelSpec) -> list[int]:
    return [layer.index for layer in spec.layers if not index_of(spec, layer.index).shared]


# -- facts -----------------------------------------------------------------------------


def test_published_indexers(write_config: WriteConfig) -> None:
    spec = read_model(write_config(V32))
    ours = index_of(spec)
    assert (ours.heads, ours.head_dim, ours.topk, ours.key_norm_eps) == (64, 128, 2048, 1e-6)
    assert (ours.rope.dim, ours.rope.pairing, spec.layers[0].mixer.rope.pairing) == (
        *(64, "half-split", "interleaved"),
    )
    # the table of the attention, YaRN and all; its mscale² stays with the softmax
    assert ours.rope.inv_freq_ends == spec.layers[0].mixer.rope.inv_freq_ends
    assert ours.rope.yarn is not None
    assert (ours.scale, ours.head_weight) == (128**-0.5, 0.125)
    assert ours.rope.score_scale == 1.0
    assert full_layers(spec) == list(range(61))

    spec = read_model(write_config(GLM))
    assert (index_of(spec).heads, index_of(spec).rope.pairing) == (32, "interleaved")
    assert index_of(spec).rope.base == 1e6
    assert full_layers(spec) == list(range(78))
    assert full_layers(read_model(write_config(GLM_52))) == [0, 1, *range(2, 78, 4)]


def test_pairing_is_a_fact_per_family(write_config: WriteConfig) -> None:
    def pairing(config: dict[str, Any]) -> tuple[str, str]:
        file = write_config(config)
        rope = index_of(read_model(file)).rope
        theirs = second_opinion.read_config(file).indexer_facts.interleaved
        assert theirs == (rope.pairing == "interleaved")
        return rope.pairing, rope.sources["pairing"].kind

    key = "indexer_rope_interleave"
    assert pairing(V32) == ("half-split", "default")
    assert pairing(V32 | {key: True}) == ("interleaved", "key")
    assert pairing(V32 | {key: False}) == ("half-split", "key")
    assert pairing(GLM) == ("interleaved", "key")
    assert pairing(GLM | {key: False}) == ("half-split", "key")
    assert pairing(without(GLM, key)) == ("interleaved", "default")
    assert pairing(GLM | {key: None}) == ("interleaved", "default")
    assert pairing(V32 | {key: None}) == ("half-split", "default")


def test_a_shared_layer_keeps_no_index_key(write_config: WriteConfig) -> None:
    spec = read_model(write_config(GLM_52))
    widths = [
        {field.name: (field.width, field.per) for field in spec.layers[layer].mixer.cache_fields}
        for layer in (2, 3)
    ]
    latent = {"latent": (512, "token"), "rope_key": (64, "token")}
    assert widths == [latent | {"index_key": (128, "token")}, latent]
    dense = read_model(write_config(published.V3)).layers[0].mixer
    assert [field.name for field in dense.cache_fields] == ["latent", "rope_key"]


INDEXER_TYPES = ["full", "full", "shared", "shared", "full", "shared"]
# Six layers, in every spelling: which are full.
SHARING: dict[str, tuple[dict[str, Any], list[int]]] = {
    "nothing": ({}, [0, 1, 2, 3, 4, 5]),
    "types": ({"indexer_types": INDEXER_TYPES}, [0, 1, 4]),
    "pattern": ({"index_topk_pattern": "FFSSFS"}, [0, 1, 4]),
    "pattern in words": ({"index_topk_pattern": INDEXER_TYPES}, [0, 1, 4]),
    "freq": ({"index_topk_freq": 3}, [0, 1, 4]),
    "freq 1": ({"index_topk_freq": 1}, [0, 1, 2, 3, 4, 5]),
    "freq 2, offset 1": ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2, 4]),
    "freq 4, offset 3": ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2]),
    "freq 3, offset 9": ({"index_topk_freq": 3, "index_skip_topk_offset": 9}, [0, 1, 2, 3, 4, 5]),
    "offset alone": ({"index_skip_topk_offset": 3}, [0, 1, 2, 3, 4, 5]),
    "told three times": (
        {"indexer_types": INDEXER_TYPES, "index_topk_pattern": "FFSSFS", "index_topk_freq": 3},
        [0, 1, 4],
    ),
    "nulls": (
        {
            "indexer_types": None,
            "index_topk_pattern": None,
            "index_topk_freq": 3,
            "index_skip_topk_offset": None,
        },
        [0, 1, 4],
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_which_layers_share(name: str, write_config: WriteConfig) -> None:
    keys, wanted = SHARING[name]
    file = write_config(GLM | {"num_hidden_layers": 6} | keys)
    assert full_layers(read_model(file)) == wanted
    theirs = second_opinion.read_config(file).indexer_facts.shared
    assert [layer for layer, shared in enumerate(theirs) if not shared] == wanted


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "saved by transformers": (
        without(V32, "scoring_func", "topk_method", "moe_layer_freq", "rope_scaling", "rope_theta"),
        {
            "head_dim": 64,
            "layer_types": ["indexed_attention"] * 61,
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
            "qk_head_dim": 192,
            "rope_parameters": without(published.yarn(), "type")
            | {"rope_type": "yarn", "rope_theta": 10000.0},
        },
    ),
    "no first_k_dense_replace": (
        without(V32, "first_k_dense_replace"),
        {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58},
    ),
    "the router's dtype": (V32, {"moe_router_dtype": "fp32"}),
    "nulls": (V32, {"moe_router_dtype": None, "rope_interleave": None}),
    "rope_interleave": (V32, {"rope_interleave": True}),
    "GLM without lists": (
        without(GLM_52, "indexer_types", "mlp_layer_types", "layer_types", "index_topk_pattern"),
        {},
    ),
    "GLM's layer types": (GLM_52, {"layer_types": ["indexed_attention"] * 78}),
    "GLM with another head_dim": (GLM_52, {"head_dim": 64}),
    "GLM with rope_theta outside": (
        without(GLM_52, "rope_parameters"),
        {"rope_theta": 8000000, "rope_scaling": None},
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_gives_the_same_model(name: str, write_config: WriteConfig) -> None:
    base, keys = SPELLINGS[name]
    plain = V32 if base["model_type"] == "deepseek_v32" else GLM_52
    file = write_config(base | keys)
    config = second_opinion.read_config(file)
    assert read_model(file) == read_model(write_config(plain))
    wanted = second_opinion.read_config(write_config(plain))
    for layer in range(config.num_hidden_layers):
        kinds = [second_opinion.layer_is_moe(each, layer) for each in (config, wanted)]
        assert kinds[0] == kinds[1]
    lists = {"mlp_layer_types": None, "first_k_dense_replace": 0}
    assert replace(config, **lists) == replace(wanted, **lists)


SIX = GLM | {"num_hidden_layers": 6}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no heads": (without(V32, "index_n_heads"), ["'index_n_heads' is missing"]),
    "no width": (without(V32, "index_head_dim"), ["'index_head_dim' is missing"]),
    "no topk": (without(V32, "index_topk"), ["'index_topk' is missing"]),
    "topk 0": (V32 | {"index_topk": 0}, ["'index_topk': found 0", "from 1"]),
    "narrow heads": (V32 | {"index_head_dim": 62}, ["'index_head_dim': found 62", "64 up"]),
    "no query latent": (V32 | {"q_lora_rank": None}, ["'q_lora_rank': found null", "latent"]),
    "attention half-split": (V32 | {"rope_interleave": False}, ["'rope_interleave': found false"]),
    "pairing in words": (
        GLM | {"indexer_rope_interleave": "interleaved"},
        ["'indexer_rope_interleave': found \"interleaved\"", "true or false"],
    ),
    "router in bfloat16": (
        GLM | {"moe_router_dtype": "bfloat16"},
        ["'moe_router_dtype': found \"bfloat16\"", '"float32"'],
    ),
    "dense layers unknown": (
        without(GLM, "first_k_dense_replace"),
        ["'first_k_dense_replace' is missing"],
    ),
    "sharing in V3.2": (V32 | {"index_topk_freq": 4}, ["nobody reads 'index_topk_freq' = 4"]),
    "a layer of another kind": (
        SIX | {"layer_types": ["indexed_attention"] * 5 + ["full_attention"]},
        ["'layer_types'", "a list of 6", "indexed_attention"],
    ),
    "too few types": (
        SIX | {"indexer_types": INDEXER_TYPES[:5]},
        ["'indexer_types'", "a list of 6"],
    ),
    "unknown type": (
        SIX | {"indexer_types": [*INDEXER_TYPES[:5], "none"]},
        ["'indexer_types'", "shared"],
    ),
    "first layer shared": (
        SIX | {"indexer_types": ["shared"] * 6},
        ["'indexer_types'", "layer 0 full"],
    ),
    "pattern too short": (SIX | {"index_topk_pattern": "FFSSF"}, ["'index_topk_pattern'", "6"]),
    "pattern too long": (SIX | {"index_topk_pattern": "FFSSFSF"}, ["'index_topk_pattern'"]),
    "other letters": (SIX | {"index_topk_pattern": "FFssFS"}, ["'index_topk_pattern'", "F (full)"]),
    "pattern of numbers": (SIX | {"index_topk_pattern": 4}, ["'index_topk_pattern': found 4"]),
    "pattern starts shared": (SIX | {"index_topk_pattern": "SFFFFF"}, ["layer 0 full"]),
    "freq 0": (SIX | {"index_topk_freq": 0}, ["'index_topk_freq': found 0", "from 1"]),
    "offset 0": (
        SIX | {"index_topk_freq": 2, "index_skip_topk_offset": 0},
        ["'index_topk_freq'", "layer 0 full"],
    ),
    "negative offset": (
        SIX | {"index_topk_freq": 2, "index_skip_topk_offset": -1},
        ["'index_skip_topk_offset': found -1"],
    ),
    "types and freq differ": (
        SIX | {"indexer_types": INDEXER_TYPES, "index_topk_freq": 2},
        ["'index_topk_freq': found 2", "what 'indexer_types' says", "layer 3, 4"],
    ),
    "pattern and freq differ": (
        SIX | {"index_topk_pattern": "FFFFFS", "index_topk_freq": 1},
        ["'index_topk_freq': found 1", "what 'index_topk_pattern' says", "layer 5"],
    ),
    "another architecture": (
        GLM | {"architectures": ["DeepseekV32ForCausalLM"]},
        ["'architectures'", "GlmMoeDsaForCausalLM"],
    ),
    "pooled keys": (GLM | {"index_kpool": 4}, ["nobody reads 'index_kpool' = 4"]),
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
    ["no heads", "no query latent", "attention half-split", "router in bfloat16",
     "too few types", "first layer shared", "pattern too short", "pattern starts shared",
     "dense layers unknown", "offset 0"],
)  # fmt: skip
def test_the_reference_refuses_too(name: str, write_config: WriteConfig) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        second_opinion.read_config(write_config(REFUSED[name][0]))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return int(caught.value.code or 0), out.out, out.err


def test_inspect(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", write_config(GLM_52))
    assert code == 0
    assert re.search(r"layers 0-2, 6, 10, .* +latent attention", out)
    assert re.search(r"layers 3-5, 7-9, .* +latent attention", out)
    assert re.search(r"shared +True +indexer_types", out)
    assert re.search(r"pairing +interleaved +indexer_rope_interleave", out)
    assert re.search(r"head_weight +0\.1767767 +formula: heads\^-0\.5", out)
    kinds = json.loads(run(capsys, "inspect", write_config(GLM_52), "--json")[1])["layer_kinds"]
    assert [len(kind["layers"]) for kind in kinds] == [3, 57, 18]
    _, out, _ = run(capsys, "inspect", write_config(V32))
    assert re.search(r"pairing +half-split +default: deepseek_v32", out)


def test_score(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    for family in FAMILIES:
        tokens = list(range(30))
        flags = ("--tokens", ",".join(map(str, tokens)), "--json")
        said = json.loads(run(capsys, "score", tiny(family), *flags)[1])["logprob"]
        exact = reference.load(tiny(family)).logprobs(tokens)
        wanted = sum(float(exact[i, token]) for i, token in enumerate(tokens[1:]))
        assert said == pytest.approx(wanted, abs=1e-12)


# -- weights ---------------------------------------------------------------------------


def test_names_and_shapes(tiny: Tiny) -> None:
    stored = load_file(tiny("glm_moe_dsa") / "model.safetensors")
    found = {name: tuple(value.shape) for name, value in stored.items() if ".indexer." in name}
    assert found == {
        f"model.layers.{layer}.self_attn.indexer.{name}": shape
        for layer in (0, 1, 4)
        for name, shape in {
            "wq_b.weight": (18 * 48, 29),
            "wk.weight": (48, 78),
            "k_norm.weight": (48,),
            "k_norm.bias": (48,),
            "weights_proj.weight": (18, 78),
        }.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_precision_is_kept_where_it_decides(family: str, tiny: Tiny) -> None:
    model = tiny(family, dtype="bfloat16")
    values = load_weights(model, read_model(model), dtype=torch.bfloat16)
    kept = {name for name, value in values.items() if value.dtype == torch.float32}
    ends = {".".join(name.split(".")[-2:]) for name in kept}
    assert ends == {"gate.weight", "gate.e_score_correction_bias", "weights_proj.weight"}
    theirs = reference.load(model, torch.bfloat16).params
    precise = {
        name.split(".")[-2] for name, value in theirs.items() if value.dtype != torch.bfloat16
    }
    assert precise == {"gate", "weights_proj"}
    # and the stored value has more digits than bfloat16 keeps
    at = "model.layers.0.self_attn.indexer.weights_proj.weight"
    assert not torch.equal(values[at], values[at].bfloat16().float())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_whole_indexers(size: int, tiny: Tiny) -> None:
    model = tiny("glm_moe_dsa", keys={"intermediate_size": 84, "moe_intermediate_size": 24})
    spec = read_model(model)
    whole = load_weights(model, spec, dtype=torch.float32)
    wanted = {name: value for name, value in whole.items() if ".indexer." in name}
    for rank in range(size):
        local = local_spec(spec, rank, size)
        assert local.layers[0].mixer.heads.count == 6 // size
        assert [index_of(local, i) for i in range(6)] == [index_of(spec, i) for i in range(6)]
        part = load_weights(model, local, dtype=torch.float32)
        found = {name for name in part if ".indexer." in name}
        assert found == wanted.keys()
        assert all(torch.equal(part[name], wanted[name]) for name in found)
        assert whole_spec(local) == spec


def edited(model: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


AT = "model.layers.0.self_attn.indexer"


def test_a_missing_bias_is_named(tiny: Tiny, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{AT}.k_norm.bias"]

    model = edited(tiny("deepseek_v32"), tmp_path, drop)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.0.*k_norm\.bias"):
        load_weights(model, read_model(model), dtype=torch.float32)


def test_what_must_not_be_fp8(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("deepseek_v32", storage=FP8_128)
    stored = load_file(model / "model.safetensors")
    ours = {name.removeprefix(f"{AT}.") for name in stored if name.startswith(AT)}
    assert {name for name in ours if name.endswith("_scale_inv")} == {
        "wq_b.weight_scale_inv",
        "wk.weight_scale_inv",
    }

    def quantise(tensors: dict[str, Tensor]) -> None:
        name = f"{AT}.weights_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    bad = edited(model, tmp_path, quantise)
    with pytest.raises(CheckpointError, match=r"weights_proj.*accepted here: F32"):
        load_weights(bad, read_model(bad), dtype=torch.float32)


def test_indexers_of_shared_layers_are_unused_by_choice(tmp_path: Path) -> None:
    subject = make_subject("glm5-spare", tmp_path / "spare")
    checkpoint = open_checkpoint(subject.model)
    assert checkpoint is not None
    ((reason, unused),) = balance(checkpoint, read_model(subject.model)).unused.items()
    assert "indexer of a shared layer" in reason
    assert len(unused) == 3 * 5
    # but only of layers that share
    spec = read_model(make_subject("glm5-all-full", tmp_path / "full").model)
    assert balance(checkpoint, spec).balanced
    taken = {use.piece.source for use in balance(checkpoint, spec).uses}
    assert f"{AT.replace('.0.', '.3.')}.wk.weight" in taken


@pytest.mark.parametrize("name", [f"{AT}.surprise.weight", f"{AT}.wk.bias"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_other_indexer_tensors_are_unexpected(
    name: str, family: str, tiny: Tiny, tmp_path: Path
) -> None:
    def put(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(1)

    model = edited(tiny(family), tmp_path, put)
    with pytest.raises(CheckpointError, match=rf"1 unexpected: .*'{re.escape(name)}'"):
        load_weights(model, read_model(model), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        reference.load(model)


@pytest.mark.parametrize("name", ["v32-mtp", "glm5-mtp"])
def test_mtp_layer_is_unused_by_choice(name: str, tmp_path: Path) -> None:
    subject = make_subject(name, tmp_path / name)
    checkpoint = open_checkpoint(subject.model)
    assert checkpoint is not None
    ((reason, unused),) = balance(checkpoint, read_model(subject.model)).unused.items()
    assert "MTP" in reason
    assert any(tensor.name.endswith("indexer.wk.weight") for tensor in unused)


# GLM-5's own head: 192 + 256 rows, which blocks of 128 cut three and a half times.
GLM_HEADS = {
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_attention_heads": 3,
    "kv_lora_rank": 130,
    "num_hidden_layers": 2,
    "index_head_dim": 140,
    "q_lora_rank": 133,
}


def test_fp8_blocks_cross_heads(tiny: Tiny) -> None:
    model = tiny("glm_moe_dsa", keys=GLM_HEADS, storage=FP8_128, dtype="bfloat16")
    spec = read_model(model)
    at = "model.layers.0.self_attn.kv_b_proj.weight"
    stored = load_file(model / "model.safetensors")
    assert stored[f"{at}_scale_inv"].shape == (11, 2)  # 1344 rows: 10.5 blocks, not 3 × 4
    CHECKS["ledger"](Subject("fp8", model, torch.empty(0), torch.empty(0)))
    whole = load_weights(model, spec, dtype=torch.float32)[at]
    row = 2 * 448 + 5  # of the third head: in block 7, as no head's own count has it
    wanted = stored[at][row, :128].float() * stored[f"{at}_scale_inv"][7, 0]
    assert torch.equal(whole[row, :128], wanted)
