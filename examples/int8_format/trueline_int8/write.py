"""`python -m trueline_int8.write FROM TO`: a plain float checkpoint, written in int8 per row."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from trueline.models import read_model
from trueline.models.parameters import parameters


def quantise(value: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers and float32 scales; the largest number of a row becomes ±127."""
    scales = (value.float().abs().amax(1) / 127).clamp_min(2.0**-100)
    return (value.float() / scales[:, None]).round().char(), scales


def write(source: Path, target: Path) -> None:
    """All matrices in int8; embedding, head, router and norms as they are."""
    shutil.copytree(source, target)
    matrices = {
        piece.source
        for parameter in parameters(read_model(source))
        if parameter.kind == "matrix"
        for piece in parameter.pieces
    }
    for file in target.glob("*.safetensors"):
        stored: dict[str, Tensor] = {}
        for name, value in load_file(file).items():
            if name in matrices:
                stored[name], stored[f"{name}_scale"] = quantise(value)
            else:
                stored[name] = value
        save_file(stored, file)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)  # it lacks the scales
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "example_int8"}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
