"""transformers' answer for a checkpoint that we made: the independent implementation."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trueline.verify.cases import Subject

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def with_oracle(subject: Subject, scratch: Path) -> Subject:
    """The subject with transformers' float64 logprobs at every position."""
    return replace(
        subject,
        oracle=transformers_logprobs(
            subject.model, subject.tokens, subject.positions, torch.float64, scratch
        ),
    )


def transformers_logprobs(
    model_dir: Path, tokens: Tensor, positions: Tensor, dtype: torch.dtype, scratch: Path
) -> Tensor:
    directory = _loadable(model_dir, scratch)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="sdpa",  # its eager softmax is float32 even in float64
        experts_implementation="eager",
    )
    return logprobs_of(model, tokens, positions)


@torch.no_grad()
def logprobs_of(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """[T, vocab], in the dtype that the transformers model has."""
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        # without a mask, a jump in position_ids is taken for the start of another sequence
        attention_mask=torch.ones_like(tokens[None]),
        use_cache=False,
    )
    logits: Tensor = output.logits[0]
    return logits.log_softmax(dim=-1)


def _loadable(model_dir: Path, scratch: Path) -> Path:
    """transformers has no class for kimi_k2; its text model is deepseek_v3."""
    config = json.loads((model_dir / "config.json").read_text())
    if config["model_type"] != "kimi_k2":
        return model_dir
    copy = scratch / f"{model_dir.name}-as-deepseek-v3"
    if not copy.exists():
        shutil.copytree(model_dir, copy)
        (copy / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    return copy
