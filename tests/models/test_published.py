"""The figures of every published configuration, from `spec/` and from `reference/` separately."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import published
from paths import CONFIGS
from trueline.models import read_model
from trueline.models.statistics import cache_costs, count_parameters
from trueline.ops.rope import inv_freq as float32_inv_freq
from trueline.reference import config as second_opinion
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.mixer import CompressedSpec, MLASpec
from trueline.weights.formats import weight_bytes
from trueline.weights.formats.pack_int4 import PackInt4


@dataclass(frozen=True)
class Figures:
    """Softmax scale, cos/sin scale, and inverse frequencies 16, 20, 31 of 32."""

    scale: float
    cos_sin: float
    frequencies: tuple[float, float, float]


_V2_FREQUENCIES = (5.5000e-3, 7.905694e-4, 3.333804e-6)
PLAIN_192, PLAIN_256 = 0.0721688, 0.0625

ROPES: dict[str, tuple[dict[str, Any], Figures]] = {
    "V2": (published.V2, Figures(0.1147214, 1.0, _V2_FREQUENCIES)),
    "V2-Lite": (published.V2_LITE, Figures(0.1147214, 1.0, _V2_FREQUENCIES)),
    "V3": (published.V3, Figures(0.1352338, 1.0, _V2_FREQUENCIES)),
    "K2 factor 32": (
        published.K2,
        Figures(0.1308608, 1.0, (4.472136e-3, 3.614047e-5, 8.764413e-7)),
    ),
    "K2 factor 64, betas 1/1": (
        published.K2_FACTOR_64,
        Figures(0.1446796, 1.0, (4.472136e-3, 1.807023e-5, 4.382206e-7)),
    ),
    "K2 factor 64, betas 32/1": (
        published.K2 | {"rope_scaling": published.yarn(factor=64.0)},
        Figures(0.1446796, 1.0, (1.537297e-3, 1.807023e-5, 4.382206e-7)),
    ),
    "K2.5": (
        {k: v for k, v in published.K25.items() if k != "quantization_config"}
        | {
            "text_config": {
                k: v for k, v in published.K25["text_config"].items() if k != "quantization_config"
            }
        },
        Figures(0.1446796, 1.0, (1.537297e-3, 1.807023e-5, 4.382206e-7)),
    ),
    "GLM-4.7-Flash": (
        published.GLM_4_7_FLASH,
        Figures(PLAIN_256, 1.0, (1e-3, 1.778279e-4, 1.539927e-6)),
    ),
    "V3.2": (published.V32, Figures(0.1352338, 1.0, _V2_FREQUENCIES)),
    "GLM-5": (
        published.GLM_5,
        Figures(PLAIN_256, 1.0, (1e-3, 1.778279e-4, 1.539927e-6)),
    ),
    "GLM-5.2": (
        published.GLM_5_2,
        Figures(PLAIN_256, 1.0, (3.535534e-4, 4.848069e-5, 2.054147e-7)),
    ),
    # the plain scale that Ling, Kimi-Linear and LongCat share: no YaRN, heads of 128 + 64
    "V3 without YaRN": (
        published.V3 | {"rope_scaling": None},
        Figures(PLAIN_192, 1.0, (1e-2, 3.162278e-3, 1.333521e-4)),
    ),
}


def from_spec(config: Path) -> Figures:
    mixer = read_model(config).layers[-1].mixer
    assert isinstance(mixer, MLASpec)
    chosen = float32_inv_freq(mixer.rope)[[16, 20, 31]].tolist()
    return Figures(mixer.softmax_scale, mixer.rope.cos_sin_scale, tuple(chosen))


def from_reference(file: Path) -> Figures:
    config = second_opinion.read_config(file)
    chosen = second_opinion.inverse_frequencies(config)[[16, 20, 31]].tolist()
    scales = second_opinion.softmax_scale(config), second_opinion.cos_sin_scale(config)
    return Figures(*scales, tuple(chosen))


READERS = {"spec": from_spec, "reference": from_reference}
WriteConfig = Callable[[dict[str, Any]], Path]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ROPES)
def test_rope_and_scale(name: str, reader: str, write_config: WriteConfig) -> None:
    config, wanted = ROPES[name]
    got = READERS[reader](write_config(config))
    assert got.scale == pytest.approx(wanted.scale, abs=6e-8)
    assert got.cos_sin == wanted.cos_sin
    assert got.frequencies == pytest.approx(wanted.frequencies, rel=6e-7)  # printed to seven digits


CORRECTION_RANGES = {
    "V2": (10, 23),
    "V3": (10, 23),
    "K2 factor 32": (19, 20),
    "K2 factor 64, betas 1/1": (19, 20),
    "K2 factor 64, betas 32/1": (8, 20),
}


@pytest.mark.parametrize("name", CORRECTION_RANGES)
def test_correction_range(name: str, write_config: WriteConfig) -> None:
    rope = read_model(write_config(ROPES[name][0])).layers[0].mixer.rope
    assert rope.correction_range == CORRECTION_RANGES[name]


# E, top-k, shared width, first MoE layer, scoring, groups, kept groups, renormalise, scaling
ROUTING: dict[str, tuple[Any, ...]] = {
    "V2": (160, 6, 2 * 1536, 1, "softmax", 8, 3, False, 16.0),
    "V2-Lite": (64, 6, 2 * 1408, 1, "softmax", 1, 1, False, 1.0),
    "V3": (256, 8, 2048, 3, "sigmoid", 8, 4, True, 2.5),
    "K2 factor 32": (384, 8, 2048, 1, "sigmoid", 1, 1, True, 2.827),
    "K2.5": (384, 8, 2048, 1, "sigmoid", 1, 1, True, 2.827),
    "GLM-4.7-Flash": (64, 4, 1536, 1, "sigmoid", 1, 1, True, 1.8),
    "V3.2": (256, 8, 2048, 3, "sigmoid", 8, 4, True, 2.5),
    "GLM-5": (256, 8, 2048, 3, "sigmoid", 1, 1, True, 2.5),
    "GLM-5.2": (256, 8, 2048, 3, "sigmoid", 1, 1, True, 2.5),
}


@pytest.mark.parametrize("name", ROUTING)
def test_routing_of_the_spec(name: str, write_config: WriteConfig) -> None:
    spec = read_model(write_config(ROPES[name][0]))
    kinds = [isinstance(layer.feed_forward, MoESpec) for layer in spec.layers]
    first = kinds.index(True)
    assert all(kinds[first:])
    moe = spec.layers[-1].feed_forward
    assert isinstance(moe, MoESpec)
    assert moe.shared_width is not None
    router = moe.router
    assert (
        moe.experts.total,
        router.top_k,
        moe.shared_width.total,
        first,
        router.scoring,
        router.num_groups,
        router.top_groups,
        router.renormalise,
        router.scaling_factor,
    ) == ROUTING[name]
    assert router.correction_bias == (router.scoring == "sigmoid")
    expected = {"softmax": "max", "sigmoid": "top2_sum"}[router.scoring]
    assert router.group_score == (expected if router.num_groups > 1 else None)


@pytest.mark.parametrize("name", ROUTING)
def test_routing_of_the_reference(name: str, write_config: WriteConfig) -> None:
    source = ROPES[name][0]
    config = second_opinion.read_config(write_config(source))
    text = source.get("text_config", source)
    kinds = [second_opinion.layer_is_moe(config, i) for i in range(config.num_hidden_layers)]
    assert all(kinds[kinds.index(True) :])
    assert (
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.n_shared_experts * text["moe_intermediate_size"],
        kinds.index(True),
        config.scoring_func,
        config.n_group,
        config.topk_group,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    ) == ROUTING[name]


def test_story_3_each_generation_has_its_own_scale(write_config: WriteConfig) -> None:
    """V3: the 192-wide head with mscale²; V4: its 512-wide head and no mscale anywhere."""
    v3 = read_model(write_config(published.V3)).layers[0].mixer
    assert v3.softmax_scale == pytest.approx(192**-0.5 * 1.368888**2, rel=1e-6)
    v4 = read_model(write_config(published.V4_FLASH))
    for layer in v4.layers:
        assert layer.mixer.softmax_scale == pytest.approx(0.0441942, abs=6e-8)
        assert layer.mixer.rope.cos_sin_scale == 1.0


def nested_v4() -> dict[str, Any]:
    """What transformers writes for the same model."""
    flat = dict(published.V4_FLASH)
    yarn = flat.pop("rope_scaling")
    ratios = flat.pop("compress_ratios")[:43]
    names = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    share = {"partial_rotary_factor": 0.125}
    flat.pop("num_hash_layers")
    return flat | {
        "layer_types": [names[ratio] for ratio in ratios],
        "compress_rates": {names[4]: 4, names[128]: 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        **share,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, **share},
            "compress": {
                **{k: v for k, v in yarn.items() if k != "type"},
                "rope_type": "yarn",
                "rope_theta": 160000,
                "attention_factor": 1.0,
                **share,
            },
        },
    }


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_v4_rope_by_layer(form: str, write_config: WriteConfig) -> None:
    raw = published.V4_FLASH if form == "flat" else nested_v4()
    spec = read_model(write_config(raw))
    ratios = [0, 0, *[4, 128] * 20, 4]
    for layer, ratio in zip(spec.layers, ratios, strict=True):
        assert isinstance(layer.mixer, CompressedSpec)
        compressor = layer.mixer.compressor
        assert (compressor.ratio if compressor else 0) == ratio
        rope = layer.mixer.rope
        inv_freq, cos_sin, scale = second_opinion.v4_layer_rope(raw, layer.index)
        assert torch.equal(float32_inv_freq(rope), inv_freq)
        assert (rope.cos_sin_scale, layer.mixer.softmax_scale) == (cos_sin, scale)
        if ratio:
            assert rope.correction_range == (15, 25)
            assert inv_freq[[16, 20, 31]].tolist() == pytest.approx(
                (2.265625e-3, 2.969778e-4, 5.680529e-7), rel=6e-7
            )
        else:
            assert rope.yarn is None
            assert inv_freq[16].item() == pytest.approx(1e-2, rel=1e-6)
    moes = [layer.feed_forward for layer in spec.layers]
    assert [moe.router.hashed for moe in moes if isinstance(moe, MoESpec)] == [True] * 3 + [
        False
    ] * 40


# total and active parameters in billions, cache bytes per token, as the models are described
SIZES = {
    "V2": (235.7, 20.9, 60 * 576 * 2),
    "V2-Lite": (15.71, 2.45, 27 * 576 * 2),
    "V3": (671.0, 36.6, 61 * 576 * 2),
    "K2 factor 32": (1026.4, 31.7, 61 * 576 * 2),
    "GLM-4.7-Flash": (29.9, 3.58, 47 * 576 * 2),
    "V3.2": (671.9, 37.5, 61 * (576 + 128) * 2),
    "GLM-5": (744, 40.8, 78 * (576 + 128) * 2),
    "GLM-5.2": (743.4, 40.3, (78 * 576 + 21 * 128) * 2),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, write_config: WriteConfig) -> None:
    spec = read_model(write_config(ROPES[name][0]))
    counts = count_parameters(spec)
    total, active, cache = SIZES[name]
    assert counts.total / 1e9 == pytest.approx(total, rel=2e-3)
    assert counts.active / 1e9 == pytest.approx(active, rel=4e-3)
    (cost,) = cache_costs(spec)
    assert (cost.bytes_per_token, cost.state_bytes_per_sequence) == (cache, 0)


def test_kimi_k25_reads_its_text_model(write_config: WriteConfig) -> None:
    spec = read_model(write_config(published.K25))
    assert spec.family == "kimi_k25"
    assert spec.refused_inputs == ("image", "video")
    assert spec.eos_token_ids == (163585,)
    assert isinstance(spec.storage, PackInt4)
    assert spec.storage.group == 32
    assert spec.sources["hidden_size"].text == "text_config.hidden_size"


def test_dense_layers_come_first(write_config: WriteConfig) -> None:
    spec = read_model(write_config(published.V3))
    assert [isinstance(layer.feed_forward, DenseSpec) for layer in spec.layers[:4]] == [
        *[True] * 3,
        False,
    ]


WHOLE = {
    "deepseek-v3": published.V3,
    "deepseek-v3.2": published.V32,
    "kimi-k2.5": published.K25,
    "glm-5-fp8": published.GLM_5,
}
"""Configs that come with the package, and what is published of these models elsewhere."""


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_of_the_benchmark_are_the_published_ones(
    name: str, write_config: WriteConfig
) -> None:
    """All that decides numbers, read from two copies."""
    ours, theirs = read_model(CONFIGS / name), read_model(write_config(WHOLE[name]))
    assert replace(ours, storage=None) == replace(theirs, storage=None)


@pytest.mark.parametrize(
    ("name", "published_gib", "other_gib"),
    [
        # the files of the release, and in them eh_proj and two copies of the vocabulary of MTP
        ("deepseek-v3.2", 642.12, (7168 * 14336 + 2 * 129280 * 7168) * 2 / 2**30),
        # vision tower and projector
        ("kimi-k2.5", 554.27, 0.877),
    ],
)
def test_checkpoints_of_whole_models_are_as_large_as_published(
    name: str, published_gib: float, other_gib: float
) -> None:
    """Every stored tensor of 163 and 64 files, MTP's layer included."""
    spec = read_model(CONFIGS / name)
    shorter = replace(spec, layers=spec.layers[:-1])
    size, without = (weight_bytes(each, 2, lambda *_: True) for each in (spec, shorter))
    stored = size + spec.mtp_layers * (size - without)
    assert stored / 2**30 + other_gib == pytest.approx(published_gib, abs=0.01)


@pytest.mark.parametrize(
    "config",
    [*("mid", "v2lite", "mid-hybrid", "ling25s", "mid-sparse", "mid-v4", "v32s", "k25s"), *WHOLE],
)
def test_benchmark_configs(config: str) -> None:
    directory = CONFIGS / config
    spec = read_model(directory)
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    assert spec.family == {"bailing_hybrid": "bailing_moe_v2_5"}.get(model_type, model_type)
