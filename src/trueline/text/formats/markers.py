"""Markers of a chat format that are tokens of the vocabulary.

A user, or the model itself, may spell `<tool_call>` in ordinary tokens: that is text. So where a
marker is one token, a parser sees a character that no text has (half of a surrogate pair) in place
of its spelling, and takes nothing else for that marker. Where it is no token, the spelling is the
marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

FIRST = 0xD800
SENTINEL = re.compile("[\ud800-\udfff]")


class Markers:
    """`spellings`: all that a format is written with, which may be tokens."""

    def __init__(self, spellings: Sequence[str], tokens: Mapping[str, int]) -> None:
        self._chars = {
            spelling: chr(FIRST + i) for i, spelling in enumerate(spellings) if spelling in tokens
        }
        self._spellings = {char: spelling for spelling, char in self._chars.items()}
        self.by_token = {tokens[spelling]: char for spelling, char in self._chars.items()}
        """The character for each token."""
        longest_first = sorted(map(re.escape, self._chars), key=len, reverse=True)
        self._any = re.compile("|".join(longest_first)) if longest_first else None

    def is_token(self, spelling: str) -> bool:
        return spelling in self._chars

    def seen(self, literal: str) -> str:
        """What the parser sees of what the format writes."""
        if self._any is None:
            return literal
        return self._any.sub(lambda found: self._chars[found[0]], literal)

    def spelled(self, text: str, hidden: Iterable[str] = ()) -> str:
        """What the parser has seen, as text; without markers that are `hidden`."""
        if SENTINEL.search(text) is None:
            return text
        left_out = set(hidden)

        def spelling(found: re.Match[str]) -> str:
            written = self._spellings.get(found[0], "\ufffd")
            return "" if written in left_out else written

        return SENTINEL.sub(spelling, text)
