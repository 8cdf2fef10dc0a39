"""DeepSeek-V4: both forms of its config, its names, its formats, its division over ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import published
from trueline.errors import CheckpointError, ConfigError, UsageError
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.models.statistics import cache_costs, count_parameters
from trueline.spec.mixer import CompressedSpec
from trueline.spec.model import ModelSpec
from trueline.spec.shard import accepted_sizes, local_spec
from trueline.tiny.configs import as_saved, family_config
from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.formats import Storage
from trueline.weights.formats.base_fp8 import BaseFp8
from trueline.weights.formats.fp4 import E8m0BlockFp8, Fp4, Fp4Experts
from trueline.weights.ledger import balance
from trueline.weights.load import load_weights

Tiny = Callable[..., Path]
WriteConfig = Callable[[dict[str, Any]], Path]

FLASH = published.V4_FLASH
PRO = FLASH | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "enable_confidence_head": True,
    "n_mtp_layers": 3,
}
BLOCK = (32, 32)
FORMATS: dict[str, Storage] = {
    "fp4": Fp4Experts(
        routed=Fp4(ignored_modules=()),
        others=E8m0BlockFp8(block=BLOCK, power_of_two_scales=True, ignored_modules=()),
    ),
    "base": BaseFp8(block=BLOCK, power_of_two_scales=False, ignored_modules=()),
}
# What packed groups of 32 columns need.
WHOLE_GROUPS = {"hidden_size": 96, "moe_intermediate_size": 64}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def mixers(spec: ModelSpec) -> list[CompressedSpec]:
    found = [layer.mixer for layer in spec.layers]
    assert all(isinstance(mixer, CompressedSpec) for mixer in found)
    return [mixer for mixer in found if isinstance(mixer, CompressedSpec)]


# -- config ----------------------------------------------------------------------------


def test_forms_and_their_compressors(write_config: WriteConfig) -> None:
    spec = read_model(write_config(FLASH))
    window, _, sparse, heavy = mixers(spec)[:4]
    assert (window.form, window.compressor, window.indexer) == ("window", None, None)
    assert sparse.compressor is not None
    assert sparse.indexer is not None
    assert heavy.compressor is not None
    assert (sparse.form, sparse.compressor.ratio, sparse.compressor.overlap) == ("sparse", 4, True)
    assert (sparse.compressor.width, sparse.compressor.tail) == (1024, 8)
    assert (heavy.form, heavy.compressor.ratio, heavy.compressor.overlap) == ("all", 128, False)
    assert (heavy.compressor.width, heavy.compressor.tail, heavy.indexer) == (512, 128, None)
    pool = sparse.indexer.compressor
    assert (pool.ratio, pool.overlap, pool.dim, pool.width) == (4, True, 128, 256)
    assert (sparse.indexer.scale, sparse.indexer.head_weight) == (128**-0.5, 0.125)
    streams = spec.hyper_connections
    assert streams is not None
    assert (streams.streams, streams.iterations, streams.eps) == (4, 20, 1e-6)
    assert [mixer.rope.yarn is None for mixer in mixers(spec)[:4]] == [True, True, False, False]


def test_pro(write_config: WriteConfig) -> None:
    spec = read_model(write_config(PRO))
    forms = [mixer.form for mixer in mixers(spec)]
    assert [forms.count(form) for form in ("window", "sparse", "all")] == [0, 30, 31]
    assert forms[:4] == ["all", "all", "sparse", "all"]
    counts = count_parameters(spec)
    assert counts.total / 1e12 == pytest.approx(1.6, abs=0.05)
    assert counts.active / 1e9 == pytest.approx(49, abs=1)


def test_sizes_of_flash(write_config: WriteConfig) -> None:
    """FIELD's formula, 21 (584 + 132) / 4 + 20 × 584 / 128, with rows of 512 and 128 bfloat16."""
    spec = read_model(write_config(FLASH))
    counts = count_parameters(spec)
    assert (round(counts.total / 1e9), round(counts.active / 1e9)) == (284, 13)
    costs = {cost.kind: cost for cost in cache_costs(spec)}
    sparse, heavy, window = (costs[f"compressed, {form}"] for form in ("sparse", "all", "window"))
    assert (sparse.layers, heavy.layers, window.layers) == (21, 20, 2)
    assert sparse.bytes_per_token == 21 * 2 * (512 + 128) / 4
    assert heavy.bytes_per_token == 20 * 2 * 512 / 128
    assert window.bytes_per_token == 0
    rows = 128 * 512 * 2
    tails = 4 * 2 * 8 * (1024 + 256)
    assert sparse.state_bytes_per_sequence == 21 * (rows + tails)
    assert heavy.state_bytes_per_sequence == 20 * (rows + 4 * 2 * 128 * 512)
    assert window.state_bytes_per_sequence == 2 * rows


def test_entries_may_take_part_of_a_byte_of_a_token(write_config: WriteConfig) -> None:
    spec = read_model(write_config(as_saved(family_config("deepseek_v4"), 3, 7)))
    costs = {cost.kind: cost for cost in cache_costs(spec)}
    assert costs["compressed, all"].bytes_per_token == pytest.approx(2 * 4 * 26 / 7)
    assert costs["compressed, sparse"].fields["entries"] == pytest.approx(2 * 4 * 26 / 3)


@pytest.mark.parametrize("config", [FLASH, PRO, family_config("deepseek_v4")])
def test_both_forms_are_one_model(config: dict[str, Any], write_config: WriteConfig) -> None:
    assert read_model(write_config(as_saved(config))) == read_model(write_config(config))


def test_both_forms_in_one_file(write_config: WriteConfig) -> None:
    """They must agree; ratios go on for the draft layers."""
    config = family_config("deepseek_v4")
    both = as_saved(config) | {"compress_ratios": [*config["compress_ratios"], 0, 0]}
    assert read_model(write_config(both)) == read_model(write_config(config))


@pytest.mark.parametrize("key", ["rope_theta", "compress_rope_theta"])
def test_bases_of_the_sections_count(key: str, write_config: WriteConfig) -> None:
    """transformers writes its class default beside them; anything else contradicts them."""
    other = family_config("deepseek_v4") | {"rope_theta": 700.0, "compress_rope_theta": 300.0}
    saved, beside = as_saved(other), {"rope_theta": 1e4, "compress_rope_theta": 16e4}
    assert read_model(write_config(saved | beside)) == read_model(write_config(other))
    with pytest.raises(ConfigError, match=rf"'{key}': found 7000.0; accepted: [37]00"):
        read_model(write_config(saved | {key: 7e3}))


def test_the_layer_type_names_the_form(write_config: WriteConfig) -> None:
    """Whatever the ratios are: here the selected form's is the larger one."""
    spec = read_model(write_config(as_saved(family_config("deepseek_v4"), 128, 4)))
    found = [(m.form, m.compressor and m.compressor.ratio) for m in mixers(spec)]
    pairs = [("sparse", 128), ("all", 4)]
    assert found == [("window", None)] * 2 + pairs * 2


def test_drafting_keys_are_shown_and_unused(write_config: WriteConfig) -> None:
    plain = read_model(write_config(FLASH))
    drafting = FLASH | DSPARK | {"compress_ratios": [*FLASH["compress_ratios"], 0, 0]}
    spec = read_model(write_config(drafting))
    assert spec.drafting_keys == tuple(DSPARK)
    assert plain.drafting_keys == ()
    assert replace(spec, drafting_keys=()) == plain


NEEDED = [
    *("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("swiglu_limit", "rms_norm_eps", "rope_theta", "compress_rope_theta", "compress_ratios"),
    *("num_hash_layers", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    *("moe_intermediate_size", "routed_scaling_factor", "scoring_func", "hidden_size"),
    *("num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size"),
    *("tie_word_embeddings", "expert_dtype"),
]


@pytest.mark.parametrize("key", NEEDED)
def test_nothing_comes_from_a_class_default(key: str, write_config: WriteConfig) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        read_model(write_config(without(FLASH, key)))


@pytest.mark.parametrize("key", ["factor", "beta_fast", "original_max_position_embeddings"])
def test_yarn_is_stated(key: str, write_config: WriteConfig) -> None:
    yarn = without(FLASH["rope_scaling"], key)
    with pytest.raises(ConfigError, match=f"'rope_scaling.{key}' is missing"):
        read_model(write_config(FLASH | {"rope_scaling": yarn}))


SAVED = as_saved(family_config("deepseek_v4"))
RATES = SAVED["compress_rates"]
ROPES = SAVED["rope_parameters"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ratio 1": (FLASH | {"compress_ratios": [1] * 44}, "'compress_ratios'"),
    "too few ratios": (FLASH | {"compress_ratios": [4] * 42}, "at least num_hidden_layers = 43"),
    "another rate": (FLASH | {"compress_rates": RATES | {"compressed_sparse_attention": 8}},
                     "as compress_ratios says"),
    "no rate": (SAVED | {"compress_rates": without(RATES, "heavily_compressed_attention")},
                "'compress_rates.heavily_compressed_attention' is missing"),
    "no rates": (without(SAVED, "compress_rates"), "'compress_rates.compressed_sparse_attention'"),
    "two schedules": (SAVED | {"compress_ratios": [0, 0, 4, 128, 128, 4]}, "as layer_types"),
    "two counts": (SAVED | {"num_hash_layers": 2}, "mlp_layer_types calls hash_moe"),
    "other hash layers": (SAVED | {"num_hash_layers": 3,
                                   "mlp_layer_types": SAVED["mlp_layer_types"][::-1]},
                          "mlp_layer_types calls hash_moe"),
    "half a nest": (SAVED | {"rope_parameters": without(ROPES, "main")}, "rope_parameters.main"),
    "yarn for windows": (SAVED | {"rope_parameters": ROPES | {"main": ROPES["compress"]}},
                         "window layers have no YaRN"),
    "other base": (SAVED | {"compress_rope_theta": 4e4}, "'compress_rope_theta'"),
    "odd groups": (FLASH | {"o_groups": 7}, "a divisor of num_attention_heads = 64"),
    "shared": (FLASH | {"n_shared_experts": 2}, "one shared expert"),
    "none shared": (FLASH | {"n_shared_experts": 0}, "one shared expert"),
    "more than experts": (FLASH | {"num_experts_per_tok": 257}, "1 to 256"),
    "rope share": (without(SAVED, "qk_rope_head_dim") | {"partial_rotary_factor": 0.31},
                   "an even number / head_dim = 26"),
    "rate of a window": (SAVED | {"compress_rates": RATES | {"sliding_attention": 1}},
                         "nobody reads"),
    "narrow index": (FLASH | {"index_head_dim": 62}, "'index_head_dim'"),
    "scoring": (FLASH | {"scoring_func": "sigmoid"}, "sqrtsoftplus"),
    "kv heads": (FLASH | {"num_key_value_heads": 8}, "one key-value head"),
    "V4.1": (FLASH | {"model_type": "deepseek_v41"}, "Engram"),
    "glm5_next": (FLASH | {"model_type": "glm5_next"}, "delta attention"),
    "kimi_k3": (FLASH | {"model_type": "kimi_k3"}, "Kimi-K3"),
    "Ling 3": ({"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]},
               "delta attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, write_config: WriteConfig) -> None:
    config, part = REFUSED[name]
    with pytest.raises(ConfigError) as found:
        read_model(write_config(config))
    assert part in str(found.value)


# -- ranks -----------------------------------------------------------------------------


def test_ranks_have_whole_groups(write_config: WriteConfig) -> None:
    spec = read_model(write_config(FLASH))
    for size in (1, 2, 4, 8):
        for rank in range(size):
            part = mixers(local_spec(spec, rank, size))[2]
            assert part.heads.count == 8 * part.o_groups.count == 64 // size
            assert part.heads.start == 8 * part.o_groups.start
    held = {p.name: p for p in parameters(local_spec(spec, 3, 8))}
    at = "model.layers.2.self_attn"
    assert held[f"{at}.sinks"].shape == (8,)
    assert held[f"{at}.sinks"].pieces[0].take == (slice(24, 32),)
    assert held[f"{at}.o_a_proj.weight"].shape == (1024, 4096)
    assert held[f"{at}.o_a_proj.weight"].pieces[0].take == (slice(3072, 4096),)
    assert held[f"{at}.o_b_proj.weight"].shape == (4096, 1024)
    assert held["model.layers.2.mlp.gate.tid2eid"].shape == (129280, 6)
    assert held[f"{at}.indexer.q_b_proj.weight"].shape == (64 * 128, 1024)


def test_sizes_that_cut_a_group_are_refused(write_config: WriteConfig) -> None:
    spec = read_model(write_config(FLASH))
    with pytest.raises(UsageError, match=r"output groups = 8.*16; accepted: 1, 2, 4, 8, "):
        local_spec(spec, 0, 16)
    assert [size for size in accepted_sizes(spec) if size <= 64] == [1, 2, 4, 8]


# -- checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("rates", [None, (3, 5)])
def test_transformers_loads_it_and_what_it_saves_loads(
    rates: tuple[int, int] | None, tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny("deepseek_v4")
    if rates is not None:
        model = tmp_path / "rates"
        make_checkpoint(model, as_saved(family_config("deepseek_v4"), *rates), TinyOptions())
    made, report = transformers.AutoModelForCausalLM.from_pretrained(
        model, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    spec = read_model(model)
    ours = load_weights(model, spec, dtype=torch.float32)
    for published_names in (True, False):  # or those that it holds
        saved = tmp_path / f"saved {published_names}"
        made.save_pretrained(saved, save_original_format=published_names)
        assert read_model(saved) == spec
        theirs = load_weights(saved, spec, dtype=torch.float32)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    table = ours["model.layers.0.mlp.gate.tid2eid"]
    assert table.dtype == torch.int64
    stored = load_file(model / "model.safetensors")
    assert torch.equal(table, stored["layers.0.ffn.gate.tid2eid"])
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn"} <= stored.keys()


def test_what_is_float32_stays_so(tiny: Tiny) -> None:
    model = tiny("deepseek_v4", dtype="bfloat16")
    loaded = load_weights(model, read_model(model), dtype=torch.bfloat16)
    exact = {name for name, value in loaded.items() if value.dtype == torch.float32}
    ends = (".sinks", ".position_bias", ".fn", ".base", ".scale", "e_score_correction_bias")
    routing = ("mlp.gate.weight", "weights_proj.weight")
    assert exact == {name for name in loaded if name.endswith((*ends, *routing))}
    assert len(exact) > 30


@pytest.mark.parametrize("name", FORMATS)
def test_formats_as_published(name: str, tiny: Tiny) -> None:
    model = tiny("deepseek_v4", keys=WHOLE_GROUPS, storage=FORMATS[name])
    stored = {name: value.dtype for name, value in load_file(model / "model.safetensors").items()}
    scales = torch.float8_e8m0fnu if name == "fp4" else torch.float32
    codes = torch.int8 if name == "fp4" else torch.float8_e4m3fn
    assert stored["layers.2.ffn.experts.0.w1.weight"] == codes
    assert stored["layers.2.ffn.experts.0.w1.scale"] == scales
    assert stored["layers.2.attn.wo_a.weight"] == torch.float8_e4m3fn
    assert stored["layers.2.attn.wo_a.scale"] == scales
    plain = [key for key in stored if "compressor" in key or "weights_proj" in key]
    assert {stored[key] for key in plain} == {torch.float32}
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    ledger = balance(checkpoint, read_model(model))
    assert ledger.balanced
    assert ledger.notes == []


@pytest.mark.parametrize("name", FORMATS)
def test_headers_must_agree_with_expert_dtype(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("deepseek_v4", keys=WHOLE_GROUPS, storage=FORMATS[name])
    other = "fp8" if name == "fp4" else "fp4"
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["expert_dtype"] = other
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    wrong = balance(checkpoint, read_model(tmp_path)).wrong
    assert any(f"while config.json says expert_dtype {other}" in line for line in wrong)


def damaged(model: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    to.mkdir()
    (to / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize("value", [-1, 12])
def test_ids_beyond_the_experts_are_refused(value: int, tiny: Tiny, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.ffn.gate.tid2eid"][310, 2] = value

    model = damaged(tiny("deepseek_v4"), tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=rf"layers.1.ffn.gate.tid2eid.*holds {value}; .*0 to"):
        load_weights(model, read_model(model), dtype=torch.float32)


def test_a_head_beside_tied_embeddings_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = damaged(tiny("deepseek_v4"), tmp_path / "m", lambda tensors: None)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'head.weight'.*config.json says tie_word_embed"):
        load_weights(model, read_model(model), dtype=torch.float32)


def test_wrong_tensors_are_named(tiny: Tiny, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()
        tensors["layers.2.attn.attn_sink"] = torch.zeros(7)
        del tensors["layers.3.attn.compressor.ape"]
        for name in ("layers.3.attn.indexer.wq_b", "norm.mtp.0"):
            tensors[f"{name}.weight"] = torch.zeros(2, 2)
        for stage in range(3):
            tensors[f"mtp.{stage}.attn.wkv.weight"] = torch.zeros(2, 2)
        tensors["mtp.2.markov_head.markov_w1"] = torch.zeros(2, 2)

    model = damaged(tiny("deepseek_v4"), tmp_path / "m", change)
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    ledger = balance(checkpoint, read_model(model))
    assert ledger.missing == ["layers.3.attn.compressor.ape"]
    assert len(ledger.wrong) == 2
    assert "'layers.0.ffn.gate.tid2eid' I32" in ledger.wrong[0] + ledger.wrong[1]
    assert "'layers.2.attn.attn_sink' F32 [7]" in ledger.wrong[0] + ledger.wrong[1]
    unexpected = ["layers.3.attn.indexer.wq_b.weight", "norm.mtp.0.weight"]
    assert [line.split("'")[1] for line in ledger.unexpected] == unexpected
    ((reason, unused),) = ledger.unused.items()
    assert "draft" in reason
    assert len(unused) == 4
