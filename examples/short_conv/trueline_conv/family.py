"""DeepSeek-V3 with short convolutions in place of attention in some layers: `conv_layers` lists
them, `conv_taps` is how many positions one sees."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from trueline.models.common import finish
from trueline.models.deepseek import DEEPSEEK_V3, read_decoder
from trueline.spec.fields import Fields
from trueline.spec.model import ModelSpec
from trueline.spec.source import Fact, Span
from trueline_conv.spec import ConvSpec

api_version = 5
LINE = replace(DEEPSEEK_V3, architectures=("ShortConvDeepseekV3ForCausalLM",))


def read(fields: Fields, overrides: dict[str, object]) -> ModelSpec:
    fields.ignore("model_type")
    spec = read_decoder(LINE, fields, overrides)

    def is_layer(value: object) -> TypeGuard[int]:
        return type(value) is int and 0 <= value < spec.num_layers

    chosen = fields.list_of("conv_layers", is_layer, "layers of the model", length=None)
    if len(set(chosen.value)) == spec.num_layers:
        fields.refuse("conv_layers", "not all layers: one at least has latent attention")
    width = Fact(Span.whole(spec.hidden_size), spec.sources["hidden_size"])
    mixer = ConvSpec.of(channels=width, taps=fields.integer("conv_taps", minimum=2, maximum=64))
    finish(fields)
    layers = tuple(
        replace(layer, mixer=mixer) if layer.index in chosen.value else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)
