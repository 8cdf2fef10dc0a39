"""How many bytes of a text one token of a tokenizer.json can stand for. Such a bound tells, without
encoding a text, that it has too many tokens.

It holds where nothing of a text is lost on its way to the tokens: each step is one that is known to
keep every byte, or to shrink by a known factor; every byte is a token, so that nothing is unknown;
and no token swallows the white space around it. Whatever is not known here has no bound.
"""

from __future__ import annotations

import json
from typing import Protocol

import tokenizers
from tokenizers import models, pre_tokenizers

from trueline.utils.json_types import JSON

NFC_SHRINKS = 9
"""Canonical decomposition makes a character shorter by a factor of 3 at most (the Kelvin sign, a
K), and composition likewise (three Hangul letters, one syllable)."""
_KEEPS = ("ByteLevel", "Digits", "Split", "Punctuation", "Sequence")


def longest_bytes(tokenizer: tokenizers.Tokenizer) -> int | None:
    shrinks = _shrinks(_state(tokenizer.normalizer))
    steps = _steps(_state(tokenizer.pre_tokenizer), "pretokenizers")
    if shrinks is None or not isinstance(tokenizer.model, models.BPE):
        return None
    names = {step["type"] for step in steps}
    lost = any(step.get("behavior") == "Removed" for step in steps)
    added = tokenizer.get_added_tokens_decoder().values()
    longest = _longest_token(tokenizer, "ByteLevel" in names)
    swallows = any(token.lstrip or token.rstrip for token in added)
    if lost or swallows or longest is None or not names <= set(_KEEPS):
        return None
    # added tokens are plain text
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


def _longest_token(tokenizer: tokenizers.Tokenizer, byte_level: bool) -> int | None:
    """In bytes; None where some byte has no token."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if byte_level:  # a byte is a character of the alphabet
        complete = all(char in vocabulary for char in pre_tokenizers.ByteLevel.alphabet())
        return max(map(len, vocabulary)) if complete else None
    bytes_apart = {f"<0x{byte:02X}>" for byte in range(256)}
    if not tokenizer.model.byte_fallback or not bytes_apart <= vocabulary.keys():
        return None
    return max(len(name.encode()) for name in (vocabulary.keys() - bytes_apart) | {" "})


class _Part(Protocol):
    """A normalizer or a pre-tokenizer."""

    def __getstate__(self) -> bytes: ...


def _state(part: _Part | None) -> JSON:
    """As tokenizer.json has it."""
    found: JSON = json.loads(part.__getstate__()) if part is not None else {}
    return found


def _steps(state: JSON, parts: str) -> list[JSON]:
    if state.get("type") == "Sequence":
        return [step for part in state[parts] for step in _steps(part, parts)]
    return [state] if state else []


def _shrinks(normalizer: JSON) -> int | None:
    """By which factor a text can get shorter."""
    steps = _steps(normalizer, "normalizers")
    if any(step["type"] != "NFC" for step in steps):
        return None
    return NFC_SHRINKS if steps else 1
