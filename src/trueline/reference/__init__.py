"""Each family as an executable definition, sharing no code with the engine it checks."""

from pathlib import Path

import torch

from trueline.reference.config import LATENT_NORM_EPS, read_config
from trueline.reference.model import Reference
from trueline.reference.weights import load_weights

__all__ = ["Reference", "load", "read_config"]


def load(
    model_dir: str | Path,
    dtype: torch.dtype = torch.float64,
    latent_norm_eps: float = LATENT_NORM_EPS,
) -> Reference:
    config = read_config(model_dir, latent_norm_eps)
    return Reference(config, load_weights(model_dir, config, dtype))
