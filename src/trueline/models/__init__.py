"""Model families: the one place where config.json gets its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from trueline.errors import ConfigError, did_you_mean
from trueline.models import bailing, deepseek, deepseek_v4, kimi_k25
from trueline.plugins import Registry
from trueline.spec.fields import Fields, read_json
from trueline.spec.model import ModelSpec
from trueline.utils.model_files import CONFIG


class Family(Protocol):
    """A reader of configs."""

    def read(self, fields: Fields, overrides: dict[str, object]) -> ModelSpec: ...


# Where `read(fields, overrides)` is, and which architectures it takes.
_OURS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "deepseek_v2": ("deepseek:DEEPSEEK_V2", deepseek.DEEPSEEK_V2.architectures),
    "deepseek_v3": ("deepseek:DEEPSEEK_V3", deepseek.DEEPSEEK_V3.architectures),
    "kimi_k2": ("deepseek:KIMI_K2", deepseek.KIMI_K2.architectures),
    "glm4_moe_lite": ("deepseek:GLM4_MOE_LITE", deepseek.GLM4_MOE_LITE.architectures),
    "deepseek_v32": ("deepseek:DEEPSEEK_V32", deepseek.DEEPSEEK_V32.architectures),
    "glm_moe_dsa": ("deepseek:GLM_MOE_DSA", deepseek.GLM_MOE_DSA.architectures),
    "kimi_k25": ("kimi_k25", kimi_k25.ARCHITECTURES),
    "deepseek_v4": ("deepseek_v4", deepseek_v4.ARCHITECTURES),
    "bailing_hybrid": ("bailing", (bailing.ARCHITECTURE,)),
}
FAMILIES = tuple(_OURS)
"""Values of model_type that we read; packages may add more."""

# Families that cannot be run yet, and what of them is not there.
REFUSED: Mapping[str, str] = {
    "deepseek_v41": "DeepSeek-V4.1, which is not DeepSeek-V4: entries and selections shared by "
    "layers, two-level selection, hyper-connections that lag by a sub-layer, Engram tables",
    "glm5_next": "GLM-5.3-Flash: gated delta attention (KDA), an indexer over pooled keys",
    "kimi_k3": "Kimi-K3: gated delta attention (KDA), gated latent attention, experts in a latent, "
    "attention residuals",
    "kimi_linear": "Kimi-Linear: gated delta attention (KDA)",
}

REGISTRY = Registry(
    "trueline.models",
    "model",
    {f"model_type.{name}": f"trueline.models.{home}" for name, (home, _) in _OURS.items()}
    | {
        f"architecture.{name}": f"trueline.models.{home}"
        for home, names in _OURS.values()
        for name in names
    },
    {"model_type": ("read",), "architecture": ("read",)},
)

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
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such file; accepted: a model directory holding config.json, "
            "or the path of a config.json"
        )
    return file


def read_model(model: str | Path, facts: Mapping[str, object] | None = None) -> ModelSpec:
    """Everything that decides the numbers of a model, resolved once. `facts` overrides the
    few facts named in OVERRIDES."""
    file = config_file(model)
    fields = Fields(read_json(file), file)
    family = find_family(fields)
    overrides = dict(facts or {})
    for name in overrides:
        if name not in OVERRIDES:
            raise ConfigError(
                f"fact '{name}' cannot be overridden; accepted: "
                f"{', '.join(OVERRIDES)}{did_you_mean(name, OVERRIDES)}"
            )
    spec: ModelSpec = family.read(fields, overrides)
    if overrides:
        raise ConfigError(f"fact '{next(iter(overrides))}' has no meaning for {spec.family}")
    return spec


def find_family(fields: Fields) -> Family:
    """Who reads this config. `architectures` comes first where a package has a reader for it: one
    model_type may name several. What is ours is told apart by its model_type."""
    found = fields.raw.get("architectures")
    for name in found if isinstance(found, list) else ():
        if REGISTRY.package("architecture", name):
            return _reader("architecture", name)
    family, known = fields.raw.get("model_type"), REGISTRY.names("model_type")
    if isinstance(family, str) and family in REFUSED and family not in known:
        raise ConfigError(
            f"{fields.file}: 'model_type': found '{family}', which cannot be run yet: "
            f"{REFUSED[family]}; accepted: {', '.join(known)}"
        )
    if family not in known:
        hint = did_you_mean(family, known) if isinstance(family, str) else ""
        raise ConfigError(
            f"{fields.file}: 'model_type': found {family!r}; accepted: {', '.join(known)}{hint}"
        )
    return _reader("model_type", family)


def _reader(kind: str, name: str) -> Family:
    family: Family = REGISTRY.get(kind, name)
    return family
