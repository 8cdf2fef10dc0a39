"""Kimi-K2.5: a vision-language wrapper around a DeepSeek-V3-shaped text model.

The text backbone is read from `text_config`; images and videos are refused by name.
"""

from __future__ import annotations

from dataclasses import replace

from trueline.errors import ConfigError
from trueline.models.common import check_architectures, finish
from trueline.models.deepseek import KIMI_K2, read_decoder
from trueline.models.storage import read_storage
from trueline.spec.fields import Fields
from trueline.spec.model import ModelSpec
from trueline.spec.source import Source

ARCHITECTURES = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")

VISION_KEYS = (
    "vision_config",
    "ignore_index",
    "image_token_id",
    "media_placeholder_token_id",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "use_unified_vision_chunk",
    "video_placeholder",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
)


def read(fields: Fields, overrides: dict[str, object]) -> ModelSpec:
    fields.ignore("model_type", *VISION_KEYS)
    check_architectures(fields, ARCHITECTURES)
    text = fields.section("text_config")
    if text is None:
        raise ConfigError(
            f"{fields.file}: 'text_config' is missing and every formula needs it; "
            "found nothing, accepted: the text model's configuration"
        )
    text.choice("model_type", ("kimi_k2", "deepseek_v3"))
    spec = read_decoder(KIMI_K2, text, overrides)
    finish(text)
    spec = _with_outer_keys(spec, fields)
    finish(fields)
    sources = {**spec.sources, "family": Source("key", "model_type")}
    return replace(spec, family="kimi_k25", refused_inputs=("image", "video"), sources=sources)


def _with_outer_keys(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Keys that the wrapper may state too: where it does, it decides, as in transformers."""
    fields.must_equal("dtype", spec.dtype, "the text model's dtype")
    fields.must_equal("torch_dtype", spec.dtype, "the text model's dtype")
    if fields.has("eos_token_id"):
        stated = fields.raw["eos_token_id"]
        ids = tuple(stated) if isinstance(stated, list) else (stated,)
        if ids != spec.eos_token_ids:
            fields.refuse("eos_token_id", f"text_config's: {list(spec.eos_token_ids)}")
    if fields.has("tie_word_embeddings"):
        tied = fields.boolean("tie_word_embeddings")
        sources = {**spec.sources, "tied_embeddings": tied.source}
        spec = replace(spec, tied_embeddings=tied.value, sources=sources)
    storage = read_storage(fields)
    if storage.value is None:
        return spec
    if spec.storage is not None and storage.value != spec.storage:
        fields.refuse("quantization_config", "the same as text_config's, or only one of the two")
    sources = {**spec.sources, "storage": storage.source}
    return replace(spec, storage=storage.value, sources=sources)
