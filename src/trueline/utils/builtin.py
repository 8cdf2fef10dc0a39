"""The models that are installed with the package: small, trained, one for each kind of attention.
Their weights lie in `witness/models/`; what they are for is in docs/witness.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "witness" / "models"


@dataclass(frozen=True)
class BuiltinModel:
    name: str
    family: str
    """As `inspect` names it."""
    stands_for: str
    """The published model whose layers it has."""

    @property
    def path(self) -> Path:
        return FOLDER / self.name


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel("witness-v3", "deepseek_v3", "a small DeepSeek-V3 (latent attention)"),
        BuiltinModel(
            "witness-ling", "bailing_moe_v2_5", "a small Ling-2.6 (linear and latent attention)"
        ),
        BuiltinModel("witness-v32", "deepseek_v32", "a small DeepSeek-V3.2 (sparse attention)"),
        BuiltinModel(
            "witness-glm5", "glm_moe_dsa", "a small GLM-5 (sparse attention, shared selection)"
        ),
        BuiltinModel("witness-k25", "kimi_k25", "a small Kimi-K2.5 (latent attention, 8 heads)"),
        BuiltinModel(
            "witness-v4", "deepseek_v4", "a small DeepSeek-V4 (compressed attention, four streams)"
        ),
    )
}
DEFAULT_MODEL = "witness-v3"
"""What a verb takes where no model is given."""
TRAINED_LEN = 1024
"""Tokens of the longest sequence in training: in longer ones, built-in models are often wrong."""
SAMPLE_PROBLEM = (
    "Mia has 34 shells. She finds 16 shells on the beach. Then she gives 9 of them to Leo. A month "
    "later Mia has twice as many shells. How many shells does Mia have now?"
)
"""Asked where no prompt is given; held out from training by its hash (`tasks.stories.split_of`)."""


def builtin_model(model: str | Path) -> BuiltinModel | None:
    """By its name. A path is never one, so that ./NAME is the directory here and NAME the built-in
    model, in whatever folder a command runs."""
    return BUILTIN_MODELS.get(model) if isinstance(model, str) else None
