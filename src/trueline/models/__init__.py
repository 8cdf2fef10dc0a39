"""Model families: the one place where config.json gets its meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trueline.errors import ConfigError, did_you_mean
from trueline.models import bailing, deepseek, deepseek_v4, kimi_k25
from trueline.spec.fields import Fields, read_json
from trueline.spec.model import ModelSpec

Reader = Callable[[Fields, dict[str, Any]], ModelSpec]

FAMILIES: Mapping[str, Reader] = {
    **{
        line.model_type: deepseek.reader(line)
        for line in (
            deepseek.DEEPSEEK_V2,
            deepseek.DEEPSEEK_V3,
            deepseek.KIMI_K2,
            deepseek.GLM4_MOE_LITE,
        )
    },
    "kimi_k25": kimi_k25.read,
    "deepseek_v4": deepseek_v4.read,
    "bailing_hybrid": bailing.read,
}

# Facts that published sources contradict each other on, and that a user may state.
OVERRIDES: Mapping[str, str] = {
    "latent_norm_eps": "eps of q_a_layernorm and kv_a_layernorm (transformers: 1e-6; "
    "serving engines: rms_norm_eps)",
    "linear_layer_factor": "by which index a linear layer of Ling 2.5/2.6 decays: l (serving "
    "engines) or l-1 (the authors' published code)",
}


def config_file(model: str | Path) -> Path:
    """The config.json of a model directory, or the file itself."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such file; accepted: a model directory holding config.json, "
            "or the path of a config.json"
        )
    return file


def read_model(model: str | Path, facts: Mapping[str, Any] | None = None) -> ModelSpec:
    """Everything that decides the numbers of a model, resolved once. `facts` overrides the
    few facts named in OVERRIDES."""
    file = config_file(model)
    fields = Fields(read_json(file), file)
    family = fields.raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES) if isinstance(family, str) else ""
        raise ConfigError(
            f"{file}: 'model_type': found {family!r}; accepted: {', '.join(FAMILIES)}{hint}"
        )
    overrides = dict(facts or {})
    for name in overrides:
        if name not in OVERRIDES:
            raise ConfigError(
                f"fact '{name}' cannot be overridden; accepted: "
                f"{', '.join(OVERRIDES)}{did_you_mean(name, OVERRIDES)}"
            )
    spec = FAMILIES[family](fields, overrides)
    if overrides:
        raise ConfigError(f"fact '{next(iter(overrides))}' has no meaning for {spec.family}")
    return spec
