"""What the files of a model's directory are called, and which of them we read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
WEIGHT_INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = ".safetensors"
TOKENIZER: Final = "tokenizer.json"
TIKTOKEN: Final = "tiktoken.model"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
TEMPLATE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
ENCODER_V32: Final = "encoding/encoding_dsv32.py"
"""Programs that DeepSeek's checkpoints have instead of a template: read, and never run."""
ENCODER_V4: Final = "encoding/encoding_dsv4.py"

SMALL_FILES: Final = (
    CONFIG, GENERATION, WEIGHT_INDEX, TOKENIZER, TIKTOKEN, TOKENIZER_CONFIG, SPECIAL_TOKENS,
    TEMPLATE, f"{MORE_TEMPLATES}/*.jinja", ENCODER_V32, ENCODER_V4,
)  # fmt: skip
"""All that we read but weights, as patterns."""


def weight_files(names: Iterable[str]) -> list[str]:
    """Of a repository without an index: those in folders are other models'."""
    return sorted(name for name in names if name.endswith(WEIGHTS) and "/" not in name)
