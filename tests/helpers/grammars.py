"""Grammars followed byte by byte, without a model."""

from __future__ import annotations

from llguidance import LLMatcher

from trueline.grammar.compiled import parser_limits
from trueline.grammar.vocabulary import byte_vocabulary


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=parser_limits())
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar: str, text: str | bytes) -> bool:
    """The whole text, from its start to its end."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    made = matcher(grammar)
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()
