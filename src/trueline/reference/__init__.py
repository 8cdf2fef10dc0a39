"""Each family as an executable definition, sharing no code with the engine it checks."""

from pathlib import Path
from typing import Any

import torch

from trueline.reference.config import read_config
from trueline.reference.deepseek_v4 import V4Reference
from trueline.reference.indexer import Selections
from trueline.reference.model import Reference
from trueline.reference.weights import ENDS, load_weights

__all__ = ["ENDS", "Reference", "Selections", "load", "read_config"]


def load(
    model_dir: str | Path,
    dtype: torch.dtype = torch.float64,
    numerics: str = "weights",
    part: int | str | tuple[str, ...] | None = None,
    device: str | torch.device = "cpu",
    **stated: Any,
) -> Reference:
    """`numerics`: how quantised checkpoints are multiplied, `weights` or `activations`, or, for
    DeepSeek V4, `published`. `part`: a layer whose weights alone are loaded, ENDS for those that
    no layer has, or how the names begin: enough for the steps that use them. `device`: where
    they are read to. `stated`: facts to override, as `read_config` takes them."""
    config = read_config(model_dir, **stated)
    kind = Reference if config.v4 is None else V4Reference
    prefix = f"model.layers.{part}." if isinstance(part, int) else part
    return kind(config, load_weights(model_dir, config, dtype, numerics, prefix, device))
