"""Reads text that comes in pieces as if all of it were there: a parser is a generator, and yields
where it needs more. What it does depends on the text alone, never on how it was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from trueline.text.formats.json_text import JsonText

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser, or a part of one, that returns T when it is through."""
SPACE = re.compile(r"\s*")


class Literals:
    """Some texts, none of which begins another, searched for at once."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        assert not any(a != b and b.startswith(a) for a in texts for b in texts), texts
        self.texts = texts
        self._any = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._firsts = "".join({text[0] for text in texts})
        self._longest = max(map(len, texts), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        return self._any.search(text)

    def begun(self, text: str) -> int:
        """How many characters at the end may yet turn out to begin one."""
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts:
                end = text[place:]
                if any(literal.startswith(end) for literal in self.texts):
                    return len(end)
        return 0


@lru_cache(maxsize=256)
def literals(*texts: str) -> Literals:
    return Literals(texts)


class Reader:
    def __init__(self) -> None:
        self.text = ""
        """Not read yet."""
        self.ended = False
        self._kept: list[str] | None = None

    def keep(self) -> None:
        """Remember from here on what is read."""
        self._kept = []

    def kept(self) -> str:
        """What was read since `keep`, which ends here."""
        found, self._kept = self._kept or [], None
        return "".join(found)

    def take(self, count: int) -> str:
        found, self.text = self.text[:count], self.text[count:]
        if self._kept is not None:
            self._kept.append(found)
        return found

    def until(self, stops: Literals, found: Callable[[str], object]) -> Reading[str | None]:
        """Which of them comes first; None where none comes. What stands before it goes to `found`,
        in pieces."""
        while True:
            match = stops.search(self.text)
            if match is not None:
                if match.start():
                    found(self.take(match.start()))
                return self.take(match.end() - match.start())
            sure = len(self.text) - (0 if self.ended else stops.begun(self.text))
            if sure:
                found(self.take(sure))
            if self.ended:
                return None
            yield

    def expect(self, accepted: Literals) -> Reading[str | None]:
        """Which of them stands here; None where none does: then nothing is read."""
        while True:
            for literal in accepted.texts:
                if self.text.startswith(literal):
                    return self.take(len(literal))
            could_be = any(literal.startswith(self.text) for literal in accepted.texts)
            if self.ended or not could_be:
                return None
            yield

    def broke_off(self, expected: Literals) -> bool:
        """Whether the text has ended, here or within one of these."""
        return self.ended and any(literal.startswith(self.text) for literal in expected.texts)

    def json(self, found: Callable[[str], object]) -> Reading[str | None]:
        """Reads a JSON value; None, or what is wrong with it. All of its text goes to `found`."""
        value = JsonText()
        while True:
            count = value.feed(self.text, self.ended)
            self.take(count)
            if piece := value.taken():
                found(piece)
            if value.done or value.error:
                return value.error
            if self.ended:
                return ENDED
            yield

    def space(self) -> Reading[str]:
        """Reads white space."""
        found = ""
        while True:
            match = SPACE.match(self.text)
            found += self.take(match.end() if match else 0)
            if self.text or self.ended:
                return found
            yield


ENDED = "the answer ended within the call"
