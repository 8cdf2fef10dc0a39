"""Configs of the benchmark's models, changed for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paths import CONFIGS

BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
FP8 = "-fp8"


def write_config(directory: Path, name: str, keys: dict[str, Any]) -> Path:
    """`directory`, with the model's config.json; a name that ends in -fp8 is that of block fp8."""
    config = json.loads((CONFIGS / name.removesuffix(FP8) / "config.json").read_text()) | keys
    if name.endswith(FP8):
        config["quantization_config"] = BLOCK_FP8
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory
