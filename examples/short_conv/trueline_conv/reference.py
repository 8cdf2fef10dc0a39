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
from trueline.reference.functional import linear, rms_norm
from trueline.reference.indexer import Selections
from trueline.reference.model import feed_forward, mix


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

    def logprobs(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        config, params = self.config, self.params
        h = params["model.embed_tokens.weight"][tokens]
        ropes = self.ropes(torch.arange(len(tokens)))
        for layer in range(config.num_hidden_layers):
            if layer in self.layers:
                h = h + self.convolve(layer, h)
            else:
                h = mix(config, params, layer, h, ropes, "expanded", Selections({}, {}))
            h = feed_forward(config, params, layer, h, None)
        x = rms_norm(h, params["model.norm.weight"], config.rms_norm_eps)
        return linear(params, "lm_head", x).log_softmax(-1)

    def convolve(self, layer: int, h: Tensor) -> Tensor:
        at, params = f"model.layers.{layer}", self.params
        x = rms_norm(h, params[f"{at}.input_layernorm.weight"], self.config.rms_norm_eps)
        before, after, inner = linear(params, f"{at}.self_attn.in_proj", x).chunk(3, -1)
        weight = params[f"{at}.self_attn.conv.weight"][:, None]
        inputs = torch.nn.functional.pad((before * inner).T[None], (self.taps - 1, 0))
        out = torch.nn.functional.conv1d(inputs, weight, groups=len(weight))[0].T
        return linear(params, f"{at}.self_attn.o_proj", after * out)
