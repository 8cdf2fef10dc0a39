"""DeepSeek V4 at dims that nobody chose: `reference/` against transformers, which loads the same
checkpoint. Any rates, orders of layers, streams, sinks of both signs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from drawn_v4 import VOCAB, drawn_config, make_drawn
from hf_v4 import EXACT_GATE, in_float64
from oracle import logprobs_of
from trueline import reference
from trueline.models import read_model

SEEDS = [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_transformers(seed: int, tmp_path: Path) -> None:
    # fewer heads give entries that score exactly alike, of which torch.topk takes any
    config = drawn_config(seed) | {"index_n_heads": 17}
    model, saved = tmp_path / "model", tmp_path / "saved"
    make_drawn(model, config, seed)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        model,
        output_loading_info=True,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert not any(report.values()), report
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (61,), generator=generator)
    with in_float64():
        wanted = logprobs_of(theirs, tokens, torch.arange(61))
    assert (reference.load(model).logprobs(tokens) - wanted).abs().max() <= EXACT_GATE
    theirs.config.save_pretrained(saved)  # its own spelling of the same
    (saved / "config.json").write_text(
        (saved / "config.json").read_text().replace("float64", "float32")
    )
    assert read_model(saved) == read_model(model)
