"""Text from tokens as they come. A character appears once it can no longer change, and all that
appeared is what decoding the whole sequence would give, however it was cut into pushes.

Work is constant for each token: nothing is decoded twice but one token of context.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from trueline.text.tokenizer import Tokenizer


class Detokenizer:
    """With `continues`, the text goes on after something: a first piece keeps its leading space,
    which `decode` of the same tokens alone would drop (SentencePiece-like vocabularies only)."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, *, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        stream = _Bytes if tokenizer.vocabulary.spells_bytes else _Pieces
        self._stream: _Bytes | _Pieces = stream(tokenizer, continues)

    def push(self, ids: Iterable[int]) -> str:
        """The text that is now certain and was not before."""
        return self._stream.push(self._tokenizer.visible(ids, self._skip))

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for half a character."""
        return self._stream.flush()


class _Bytes:
    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._token_bytes = tokenizer.vocabulary.token_bytes
        # replaces wrong bytes exactly as decoding the whole does: one U+FFFD for each longest
        # beginning of a character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        return self._decoder.decode(b"".join(self._token_bytes(token) or b"" for token in ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Pieces:
    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._vocabulary = tokenizer.vocabulary
        # tokens whose text is out, kept so that the next one is not taken for the first
        self._context = list(tokenizer.anchor) if continues else []
        self._held: list[int] = []

    def push(self, ids: list[int]) -> str:
        # One wrong byte spoils its whole run of byte tokens, so a run is held until it is over.
        # What is held already is such a run: only the new tokens can end it.
        end = len(ids)
        while end and self._vocabulary.token_bytes(ids[end - 1]) is not None:
            end -= 1
        self._held += ids
        return self._release(len(self._held) - (len(ids) - end) if end else 0)

    def flush(self) -> str:
        return self._release(len(self._held))

    def _release(self, end: int) -> str:
        if not end:
            return ""
        ready, self._held = self._held[:end], self._held[end:]
        head = self._vocabulary.decode(self._context)
        text = self._vocabulary.decode(self._context + ready)
        last = ready[-1:]
        # a context without text of its own would not protect the leading space of what follows
        if self._vocabulary.decode(last):
            self._context = last
        elif not head:
            self._context = self._context + ready
        return text[len(head) :]
