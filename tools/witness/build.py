"""The training code of a config.json, and what it computes in float64."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from trueline import reference
from witness.model import Model
from witness.v4 import V4


def build(directory: Path) -> Model | V4:
    config = reference.read_config(directory)
    if config.v4 is not None:
        return V4(config)
    raw = json.loads((directory / "config.json").read_text())
    return Model(config, raw.get("text_config", raw)["intermediate_size"])


def exact_logprobs(model: Model | V4, tokens: Tensor) -> Tensor:
    """[T, vocabulary], with the keys or entries that its indexers select."""
    model = model.double()
    first, second = model.ropes(len(tokens), torch.device("cpu"))
    ropes = (first[0].double(), first[1].double()), (second[0].double(), second[1].double())
    with torch.no_grad():
        if model.topk is None:
            logits, _ = model(tokens[None], ropes)
        else:
            logits, *_ = model.forward_sparse(tokens[None], ropes, torch.zeros(1))
    return logits[0].log_softmax(-1)
