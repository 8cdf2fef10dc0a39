"""Grammars followed byte by byte, without a model."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from trueline.grammar.compiled import parser_limits


class _Bytes:
    """A token for every byte, and an end."""

    bos_token_id = None
    eos_token_id = 256
    tokens = (*(bytes([each]) for each in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=parser_limits())
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar: str, text: str | bytes) -> bool:
    """The whole text, from its start to its end."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    made = matcher(grammar)
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()
