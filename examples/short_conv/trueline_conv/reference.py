"""The same family in float64, from the files: full sequence, no cache, torch's own convolution.
Attention and experts are Trueline's definition of DeepSeek-V3; nothing here is the engine's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from trueline.reference import Reference, read_config
from trueline.reference.functional import linear
from trueline.reference.model import Sequence


class ConvReference(Reference):
    def __init__(self, model: Path) -> None:
        raw = json.loads((model / "config.json").read_text())
        self.layers, self.taps = raw.pop("conv_layers"), raw.pop("conv_taps")
        raw["architectures"] = ["DeepseekV3ForCausalLM"]
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(raw))
            config = read_config(directory)
        files = sorted(model.glob("*.safetensors"))
        stored = {name: value for file in files for name, value in load_file(file).items()}
        super().__init__(config, {name: value.double() for name, value in stored.items()})

    def mixed(self, layer: int, x: Tensor, sequence: Sequence) -> Tensor:
        if layer in self.layers:
            return self.convolve(layer, x)
        return super().mixed(layer, x, sequence)

    def convolve(self, layer: int, x: Tensor) -> Tensor:
        at, params = f"model.layers.{layer}", self.params
        before, after, inner = linear(params, f"{at}.self_attn.in_proj", x).chunk(3, -1)
        weight = params[f"{at}.self_attn.conv.weight"][:, None]
        inputs = torch.nn.functional.pad((before * inner).T[None], (self.taps - 1, 0))
        out = torch.nn.functional.conv1d(inputs, weight, groups=len(weight))[0].T
        return linear(params, f"{at}.self_attn.o_proj", after * out)
