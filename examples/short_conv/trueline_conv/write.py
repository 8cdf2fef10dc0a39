"""`python -m trueline_conv.write FROM TO LAYER...`: a DeepSeek-V3 checkpoint whose attention is
replaced by convolutions of 4 taps, with random weights, in these layers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TAPS = 4


def write(source: Path, target: Path, layers: list[int]) -> None:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["ShortConvDeepseekV3ForCausalLM"]
    config |= {"conv_layers": layers, "conv_taps": TAPS}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    files = sorted(target.glob("*.safetensors"))
    stored = {name: value for file in files for name, value in load_file(file).items()}
    replaced = tuple(f"model.layers.{layer}.self_attn." for layer in layers)
    kept = {name: value for name, value in stored.items() if not name.startswith(replaced)}
    for file in files:
        file.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    width, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    shapes = {"in_proj": (3 * width, width), "conv": (width, TAPS), "o_proj": (width, width)}
    for at in replaced:
        for part, shape in shapes.items():
            value = torch.randn(shape, generator=generator) * shape[1] ** -0.25
            kept[f"{at}{part}.weight"] = value.to(stored["model.norm.weight"].dtype)
    save_file(kept, target / "model.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), [int(layer) for layer in sys.argv[3:]])
