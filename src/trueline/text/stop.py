"""Stop strings, found in text that comes in pieces.

The stop string that is *complete* first wins: generation ends there, whatever might have followed.
Of several complete at the same character, the longest wins. So the result depends on the text
alone, not on how it was cut, nor on the order of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trueline.errors import UsageError


class StopResult(NamedTuple):
    text: str
    """Safe to emit now."""
    matched: str | None
    """The stop string that ended the text."""


class StopChecker:
    """Holds back the longest end of the text that may yet turn out to begin a stop string."""

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise UsageError(f"stop = {stops!r}: accepted: a list of strings that are not empty")
        # the longest first: the first one found complete is the one wanted
        ordered = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._searches = [_Search(stop) for stop in ordered]
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Text after a match is dropped."""
        if self.matched is not None:
            return StopResult("", self.matched)
        if not self._searches:
            return StopResult(text, None)
        for i, char in enumerate(text):
            complete = [search.stop for search in self._searches if search.advance(char)]
            if complete:
                return self._stop(complete[0], self._held + text[: i + 1])
        seen = self._held + text
        keep = max(search.matching for search in self._searches)
        self._held = seen[len(seen) - keep :]
        return StopResult(seen[: len(seen) - keep], None)

    def _stop(self, stop: str, text: str) -> StopResult:
        self.matched, self._held = stop, ""
        return StopResult(text if self._include else text[: len(text) - len(stop)], stop)

    def flush(self) -> str:
        """What is held, when no more text comes."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One string, by Knuth, Morris and Pratt: never looks back at the text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matching = 0
        """How many of its first characters the text ends with."""
        # _fallback[n]: the longest beginning that the first n characters also end with
        self._fallback = [0, 0]
        for char in stop[1:]:
            self._fallback.append(self._longer(self._fallback[-1], char))

    def _longer(self, matching: int, char: str) -> int:
        while matching and self.stop[matching] != char:
            matching = self._fallback[matching]
        return matching + (self.stop[matching] == char)

    def advance(self, char: str) -> bool:
        self.matching = self._longer(self.matching, char)
        return self.matching == len(self.stop)
