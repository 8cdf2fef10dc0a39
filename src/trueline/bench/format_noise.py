"""The noise band of each weight format: what its numerics do to a model's logprobs, at every
position of the same tokens, against the same checkpoint in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from trueline.bench.cache_noise import noise_prompts
from trueline.bench.formats import PLAIN, storage_of
from trueline.bench.models import find_bench_model
from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.spec.fields import read_json
from trueline.tiny.configs import change_config
from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask, run
from trueline.verify.numerics import Noise, exact_logprobs
from trueline.weights.formats import quantised_formats

RANDOM_LEN = 64
"""Tokens of a prompt for a model that is not built in."""


@dataclass(frozen=True)
class FormatNoise:
    format: str
    numerics: str
    noise: Noise

    def as_json(self) -> JSON:
        return {"format": self.format, "numerics": self.numerics, **self.noise.as_json()}


def format_noise(
    model: str, names: Sequence[str], prompts: int, say: Callable[[str], None]
) -> list[FormatNoise]:
    """Of a checkpoint in plain float, quantised here."""
    path, has_weights = find_bench_model(model)
    if not has_weights or read_model(path).storage is not None:
        raise UsageError(
            f"--noise: {model} has {'quantised' if has_weights else 'no'} weights; accepted: a "
            "checkpoint in plain float, or a built-in model"
        )
    asks = [Ask(tokens, 1) for tokens in noise_prompts(model, path, prompts, RANDOM_LEN)]
    found: list[FormatNoise] = []
    for name in names:
        say(f"quantising to {name}")
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "model"
            _quantise(path, directory, name)
            found += _compared(name, directory, asks)
    return found


def _quantise(path: Path, directory: Path, name: str) -> None:
    """The checkpoint's numbers in another format."""
    config = read_json(path / "config.json")
    text = config.get("text_config", config)
    change_config(config, {}, storage=None if name in PLAIN else storage_of(name))
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored |= load_file(file)
    options = TinyOptions(dtype=text.get("torch_dtype") or text["dtype"])
    make_checkpoint(directory, config, options, values=lambda name: stored[name].float())


def _compared(name: str, model: Path, asks: Sequence[Ask]) -> Iterator[FormatNoise]:
    wanted = exact_logprobs(model, [torch.tensor(ask.prompt) for ask in asks])
    config = EngineConfig(max_num_seqs=len(asks), enable_prefix_caching=False, enforce_eager=True)
    for numerics in _numerics(model):
        done = run(model, asks, config, numerics=numerics)
        rows = [done.logits[i][p] for i, ask in enumerate(asks) for p in range(len(ask.prompt))]
        ours = torch.stack(rows).cpu().double().log_softmax(-1)
        yield FormatNoise(name, numerics, Noise.of(torch.cat(wanted), ours))


def _numerics(model: Path) -> tuple[str, ...]:
    """That the formats of a model have."""
    found = {each: None for fmt in quantised_formats(read_model(model)) for each in fmt.numerics}
    return tuple(found) or ("weights",)
