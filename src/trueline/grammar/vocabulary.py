"""A model's vocabulary as llguidance knows it: the bytes of every token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from trueline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WORD = 32
"""Tokens in a word of a mask."""


class _Spelled:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Iterable[int]) -> None:
        # which tokens end an output is not the vocabulary's to say: this one is none of the model's
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<|end of the output|>"]
        self.special_token_ids = [*special_ids, self.eos_token_id]
        self._first = {spelled[0]: i for i, spelled in reversed(list(enumerate(self.tokens)))
                       if len(spelled) == 1}  # fmt: skip

    def __call__(self, text: bytes | str) -> list[int]:
        """llguidance wants a tokenizer's own choice of tokens where it forces text, which we never
        ask of it."""
        spelled = text.encode() if isinstance(text, str) else text
        return [self._first[byte] for byte in spelled if byte in self._first]


def vocabulary_of(tokens: Sequence[bytes], special_ids: Iterable[int] = ()) -> LLTokenizer:
    """A token without bytes spells nothing, and is never allowed."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Spelled(tokens, special_ids)))


@cache
def byte_vocabulary() -> LLTokenizer:
    """Of no model: what a grammar allows is the same in every vocabulary that has all bytes."""
    return vocabulary_of([bytes([each]) for each in range(256)])


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """`vocab_size`: how many logits the model gives. Takes a second for 100,000 tokens."""
    tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    # an added token may be a mark of the chat's format: it is never part of a text
    apart = tokenizer.special_ids | tokenizer.vocabulary.added
    return vocabulary_of(tokens, sorted(token for token in apart if token < vocab_size))


def mask_words(vocab_size: int) -> int:
    """Of a token mask: llguidance's has one token more than the model."""
    return -(-(vocab_size + 1) // WORD)
