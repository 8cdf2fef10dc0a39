"""Which encoding makes prompts of a checkpoint's chats, where it has no template for them: that of
its model_type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueline.spec.source import Fact
from trueline.text import deepseek_v4_files, deepseek_v32
from trueline.text.deepseek_v4 import DeepSeekV4Encoding
from trueline.text.deepseek_v32 import DeepSeekV32Encoding
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.text.vocabulary import Vocabulary


class ChatEncoding(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def calls(self) -> str:
        """The format of its answers (`formats.choose`)."""
        ...

    @property
    def reads(self) -> Sequence[str]:
        """The arguments that it knows."""
        ...

    def render(
        self,
        messages: Sequence[JSON],
        add_generation_prompt: bool,
        tools: object,
        arguments: Mapping[str, object],
    ) -> str: ...


@dataclass(frozen=True)
class FoundEncoding:
    title: str
    facts: Mapping[str, Fact[object]]
    """Of requests that do not say, as `inspect` shows them."""
    make: Callable[[Vocabulary, Mapping[str, str]], ChatEncoding]
    """Of a vocabulary and the names of its special tokens."""


def find_encoding(config: JSON, directory: Path | None) -> FoundEncoding | None:
    """Without a directory, from config.json alone."""
    match config.get("model_type"):
        case deepseek_v32.FAMILY:
            v32 = deepseek_v32.read_defaults(config, directory)
            make = partial(DeepSeekV32Encoding, v32)
            return FoundEncoding(DeepSeekV32Encoding.title, v32.facts(), make)
        case deepseek_v4_files.FAMILY:
            v4 = deepseek_v4_files.read_defaults(config, directory)
            make4 = partial(DeepSeekV4Encoding, v4)
            return FoundEncoding(DeepSeekV4Encoding.title, v4.facts(), make4)
    return None
