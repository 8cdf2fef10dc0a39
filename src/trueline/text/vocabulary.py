"""A tokenizer.json: which tokens there are, and how they spell text.

Vocabularies spell in one of two ways, and streaming has to know which:

- *bytes* (ByteLevel, tiktoken): a token is a run of bytes, text is the UTF-8 of all of them.
- *pieces* (Metaspace, byte fallback, …): a token is a piece of text whose looks may depend on
  being the first, and on nothing else; but a run of byte tokens is text only when it is over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers

from trueline.errors import UsageError
from trueline.text.coverage import longest_bytes
from trueline.text.files import AddedToken
from trueline.utils.json_types import JSON

FEW = 1024
"""Tokens that are decoded in less time than other threads would notice."""


class Vocabulary(Protocol):
    @property
    def spells_bytes(self) -> bool: ...
    @property
    def size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def flagged(self) -> frozenset[int]:
        """Ids of the tokens marked special."""
        ...

    @property
    def added(self) -> frozenset[int]:
        """Ids of the tokens that stand for themselves in a text, and are never made of pieces."""
        ...

    @property
    def longest_bytes(self) -> int | None:
        """A token stands for so many bytes of a text at most; None where nobody knows."""
        ...

    def token_id(self, token: str) -> int | None: ...
    def encode(self, text: str, with_ends: bool) -> list[int]:
        """`with_ends`: with the tokens that the vocabulary's own post-processor puts around."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def token_bytes(self, token: int) -> bytes | None:
        """What the token spells, where that is bytes, and b"" for an id without a token; None for
        a piece of text."""
        ...


class JsonVocabulary:
    def __init__(self, file: Path, added: Sequence[AddedToken], special: Sequence[str]) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any bad file
            raise UsageError(f"{file}: not a tokenizer ({error})") from error
        # a stored truncation would cut prompts without a word
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add(file, added)
        self._mark_special(special)
        decoder = self._tokenizer.decoder
        steps = _flatten(json.loads(decoder.__getstate__())) if decoder else []
        self.spells_bytes = _spells_bytes(file, steps)
        self._has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        entries = self._tokenizer.get_added_tokens_decoder()
        flags = {token: entry.special for token, entry in entries.items()}
        flags |= {token.id: token.special for token in added}  # the later word
        self.added = frozenset(flags)
        self.flagged = frozenset(token for token, is_special in flags.items() if is_special)
        self._bytes: dict[int, bytes | None] = {}  # of tokens that somebody has asked for

    def _add(self, file: Path, added: Sequence[AddedToken]) -> None:
        """tokenizer_config.json may know tokens that tokenizer.json does not. The library gives
        ids itself, so they are checked."""
        known = self._tokenizer.get_added_tokens_decoder()
        for token in added:
            if token.id in known and known[token.id].content == token.content:
                continue
            entry = tokenizers.AddedToken(
                token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
                special=token.special,
            )
            add = (
                self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens
            )
            add([entry])
            found = self._tokenizer.token_to_id(token.content)
            if found != token.id:
                raise UsageError(
                    f"{file}: token '{token.content}' gets id {found}, tokenizer_config.json's "
                    f"added_tokens_decoder says {token.id}; the two files do not belong together"
                )

    def _mark_special(self, special: Sequence[str]) -> None:
        """A named token that is an ordinary one in tokenizer.json is found in text all the same.
        One that is in no file is left out: it has no id, so no model can know it."""
        listed = {entry.content for entry in self._tokenizer.get_added_tokens_decoder().values()}
        for token in special:
            if token not in listed and self._tokenizer.token_to_id(token) is not None:
                self._tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True)])

    @cached_property
    def size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @cached_property
    def longest_bytes(self) -> int | None:
        return longest_bytes(self._tokenizer)

    def encode(self, text: str, with_ends: bool) -> list[int]:
        # of the library's ways in, only those for batches let other threads go on
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_ends)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) < FEW:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        else:
            (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes | None:
        if token in self._bytes:
            return self._bytes[token]
        name = self._tokenizer.id_to_token(token)
        if name is None:  # beyond the vocabulary: logits are often padded
            return b""
        found = self._bytes[token] = self._spelled(name)
        return found

    def _spelled(self, name: str) -> bytes | None:
        if self.spells_bytes:
            return spelled(name)
        match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name) if self._has_byte_tokens else None
        return bytes.fromhex(match[1]) if match else None


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes in order for
    the characters from 256 up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printable |= set(range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def spelled(name: str) -> bytes:
    """A token's bytes. A name that is not in the alphabet (of an added token) is plain text."""
    alphabet = _byte_of()
    try:
        return bytes(alphabet[char] for char in name)
    except KeyError:
        return name.encode()


def _flatten(decoder: JSON) -> list[JSON]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


# Each looks at one token, at whether it is the first, and at nothing else.
_BY_TOKEN = ("Metaspace", "ByteFallback", "Fuse", "Replace", "Strip")


def _spells_bytes(file: Path, steps: list[JSON]) -> bool:
    """True for bytes, False for pieces. Other decoders could change text already streamed."""
    names = [step["type"] for step in steps]
    if "ByteLevel" in names:
        if set(names) <= {"ByteLevel", "Fuse"}:
            return True
        raise UsageError(f"{file}: decoder {' + '.join(names)}; accepted: ByteLevel alone")
    fused = False
    for step in steps:
        name = step["type"]
        cuts_the_end = name == "Strip" and step.get("stop", 0) != 0
        crosses_tokens = fused and name not in ("Fuse", "Strip")
        if name not in _BY_TOKEN or cuts_the_end or crosses_tokens:
            why = " that cuts the end" if cuts_the_end else " after Fuse" if crosses_tokens else ""
            raise UsageError(
                f"{file}: decoder '{name}'{why} cannot be streamed; accepted: ByteLevel, or "
                f"{', '.join(_BY_TOKEN)}"
            )
        fused = fused or name == "Fuse"
    return False
