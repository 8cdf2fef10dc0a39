"""The spec's rope is bit for bit the table that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf
from hf import Case, Checkpoints
from paths import CONFIGS
from trueline.models import read_model
from trueline.ops.rope import inv_freq as float32_inv_freq
from trueline.spec.mixer import MLASpec
from trueline.spec.rope import RopeSpec, YarnSpec


@pytest.mark.parametrize("name", [name for name in hf.YARNS if name != "factor below 1"])
def test_yarn_has_the_bits_of_transformers(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **hf.YARNS[name]}
    theirs = transformers.DeepseekV3Config(rope_parameters=rope, max_position_embeddings=163840)
    theirs.save_pretrained(tmp_path)
    mixer = read_model(tmp_path).layers[0].mixer
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert torch.equal(float32_inv_freq(mixer.rope), inv_freq)
    assert mixer.rope.cos_sin_scale == attention_factor


@pytest.mark.parametrize("case", hf.GRID, ids=str)
def test_rope_and_scale_equal_the_built_model(case: Case, checkpoints: Checkpoints) -> None:
    spec = read_model(checkpoints(case).path)
    built = checkpoints(case).model.float().model
    built = getattr(built, "language_model", built)
    for layer, block in zip(spec.layers, built.layers, strict=True):
        assert isinstance(layer.mixer, MLASpec)
        assert torch.equal(float32_inv_freq(layer.mixer.rope), built.rotary_emb.inv_freq)
        assert layer.mixer.rope.cos_sin_scale == built.rotary_emb.attention_scaling
        assert layer.mixer.softmax_scale == pytest.approx(block.self_attn.scaling, rel=1e-15)


@given(
    half=st.integers(1, 96),
    base=st.floats(1.5, 1e7),
    factor=st.floats(1, 200),
    original=st.integers(1, 200_000),
    betas=st.tuples(st.floats(0.01, 200), st.floats(0.01, 200)),
    truncate=st.booleans(),
)
def test_any_yarn_has_the_bits_of_transformers(
    half: int, base: float, factor: float, original: int, betas: Any, truncate: bool
) -> None:
    slow, fast = sorted(betas)
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
    }
    theirs = transformers.DeepseekV3Config(rope_parameters=rope, qk_rope_head_dim=2 * half)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = RopeSpec(
        dim=2 * half,
        pairing="interleaved",
        base=base,
        yarn_scales_magnitude=True,
        yarn=YarnSpec(
            factor=factor,
            original_max_position=original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=truncate,
            mscale=0.0,
            mscale_all_dim=0.0,
            attention_factor=None,
            apply_yarn_scaling=True,
        ),
    )
    assert torch.equal(float32_inv_freq(ours), inv_freq)
    assert ours.cos_sin_scale == attention_factor


def test_floats_and_tensors_agree() -> None:
    """`inspect` computes one frequency in float64 with the same lines that build the table."""
    spec = read_model(CONFIGS / "v2lite")
    rope = spec.layers[0].mixer.rope
    floats = [rope.inv_freq(e, r) for e, r in zip(rope.exponents, rope.ramp, strict=True)]
    assert float32_inv_freq(rope).tolist() == pytest.approx(floats, rel=1e-6)
    assert rope.inv_freq_ends == (floats[0], floats[-1])
    assert json.dumps(rope.inv_freq_ends)
