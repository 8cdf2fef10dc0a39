"""Each family as an executable definition, sharing no code with the engine it checks."""

from pathlib import Path
from typing import Any

import torch

from trueline.reference.config import read_config
from trueline.reference.deepseek_v4 import V4Reference
from trueline.reference.model import Reference
from trueline.reference.weights import load_weights

__all__ = ["Reference", "load", "read_config"]


def load(
    model_dir: str | Path,
    dtype: torch.dtype = torch.float64,
    numerics: str = "weights",
    **stated: Any,
) -> Reference:
    """`numerics`: how quantised checkpoints are multiplied, `weights` or `activations`, or, for
    DeepSeek V4, `published`. `stated`: facts to override, as `read_config` takes them."""
    config = read_config(model_dir, **stated)
    kind = Reference if config.v4 is None else V4Reference
    return kind(config, load_weights(model_dir, config, dtype, numerics))
