"""Layers that keep the same kind must keep it alike: the first one's layout serves them all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.spec.mixer import LightningSpec, MixerSpec, MLASpec
from trueline.spec.source import Span
from trueline.tiny.configs import family_config

Change = Callable[[Any], MixerSpec]


def mixer_with(**changes: Any) -> Change:
    return lambda mixer: replace(mixer, **changes)


def indexer_with(**changes: Any) -> Change:
    return lambda mixer: replace(mixer, indexer=replace(mixer.indexer, **changes))


LATENT = "layers with latent attention"
INDEXER = "indexers of different widths or topk"
STATE = "linear layers with states of different widths"


@pytest.mark.parametrize(
    ("family", "kind", "change", "told"),
    [
        ("deepseek_v3", MLASpec, mixer_with(heads=Span.whole(2)), LATENT),
        ("deepseek_v3", MLASpec, mixer_with(kv_lora_rank=8), LATENT),
        ("deepseek_v3", MLASpec, mixer_with(qk_rope_head_dim=4), LATENT),
        ("deepseek_v3", MLASpec, mixer_with(qk_nope_head_dim=4), LATENT),
        ("deepseek_v3", MLASpec, mixer_with(v_head_dim=4), LATENT),
        ("deepseek_v32", MLASpec, indexer_with(topk=3), INDEXER),
        ("deepseek_v32", MLASpec, indexer_with(head_dim=4), INDEXER),
        ("bailing_moe_v2_5", LightningSpec, mixer_with(heads=Span.whole(2)), STATE),
        ("bailing_moe_v2_5", LightningSpec, mixer_with(head_dim=4), STATE),
    ],
)
def test_a_layer_that_differs_is_refused(
    family: str, kind: type[MixerSpec], change: Change, told: str, tmp_path: Path
) -> None:
    """The last layer of the kind, which is not the one whose layout is taken."""
    (tmp_path / "config.json").write_text(json.dumps(family_config(family)))
    spec = read_model(tmp_path)
    config, device = EngineConfig(max_model_len=64, num_gpu_blocks_override=20), find_device("cpu")
    make_plan(spec, config, device)
    last = max(i for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, kind))
    layers = list(spec.layers)
    layers[last] = replace(layers[last], mixer=change(layers[last].mixer))
    with pytest.raises(UsageError, match=told):
        make_plan(replace(spec, layers=tuple(layers)), config, device)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "bailing_moe_v2_5"])
def test_a_part_of_the_layers_is_numbered_anew(family: str, tmp_path: Path) -> None:
    """As dry steps have them: the last layers only, which the model has elsewhere."""
    (tmp_path / "config.json").write_text(json.dumps(family_config(family)))
    spec = read_model(tmp_path)
    config = EngineConfig(max_model_len=64, num_gpu_blocks_override=20)
    plan = make_plan(spec, config, find_device("cpu"))
    kept = list(range(1, len(spec.layers)))
    part = plan.of_layers(kept)
    for whole, kind in zip(plan.kinds, part.kinds, strict=True):
        assert [kept[layer] for layer in kind.layers] == [i for i in whole.layers if i in kept]
    assert {kind for group in part.groups for kind in group.kinds} <= set(part.kinds)
