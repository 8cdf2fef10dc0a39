"""Stop strings, found in text that comes in pieces.

The stop string that is *complete* first wins: generation ends there, whatever might have followed.
Of several complete at the same character, the longest wins. So the result depends on the text
alone, not on how it was cut, nor on the order of the list.

All of them are searched for at once, by Aho and Corasick: what a character costs does not depend on
how many there are, nor on how long they are.
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


class StopStrings:
    """The automaton: a node for every beginning of a stop string, the first for none of it. Built
    once for all sequences of a request."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise UsageError(f"stop = {stops!r}: accepted: a list of strings that are not empty")
        self._next: dict[int, int] = {}
        """By node and character, as one number: a dict for each node takes ten times as long."""
        self._came = [(0, "")]
        """The node before, and the character after it."""
        self.depth = [0]
        self.complete: list[str | None] = [None]
        """The longest stop string that a node's text ends with."""
        for stop in stops:
            self._add(stop)
        self._fallback = [0] * len(self.depth)
        """The longest other beginning that a node's text ends with."""
        self._link()

    def __bool__(self) -> bool:
        return len(self.depth) > 1

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            found = self._next.setdefault(node << 21 | ord(char), len(self.depth))
            if found == len(self.depth):
                self._came.append((node, char))
                self.depth.append(self.depth[node] + 1)
                self.complete.append(None)
            node = found
        self.complete[node] = stop

    def _link(self) -> None:
        """Shorter ones first: what a node falls back to is shorter than itself."""
        for node in sorted(range(1, len(self.depth)), key=self.depth.__getitem__):
            before, char = self._came[node]
            if before:
                self._fallback[node] = self.advance(self._fallback[before], char)
            if self.complete[node] is None:
                self.complete[node] = self.complete[self._fallback[node]]

    def advance(self, node: int, char: str) -> int:
        code = ord(char)
        while (found := self._next.get(node << 21 | code)) is None and node:
            node = self._fallback[node]
        return found or 0


class StopChecker:
    """Holds back the longest end of the text that may yet turn out to begin a stop string."""

    def __init__(self, stops: StopStrings | Sequence[str], include_in_output: bool) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include_in_output
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Text after a match is dropped."""
        if self.matched is not None:
            return StopResult("", self.matched)
        stops, node = self._stops, self._node
        if not stops:
            return StopResult(text, None)
        for i, char in enumerate(text):
            node = stops.advance(node, char)
            complete = stops.complete[node]
            if complete is not None:
                return self._stop(complete, self._held + text[: i + 1])
        self._node = node
        seen, keep = self._held + text, stops.depth[node]
        self._held = seen[len(seen) - keep :]
        return StopResult(seen[: len(seen) - keep], None)

    def _stop(self, stop: str, text: str) -> StopResult:
        self.matched, self._held = stop, ""
        return StopResult(text if self._include else text[: len(text) - len(stop)], stop)

    def flush(self) -> str:
        """What is held, when no more text comes, or none that goes on from here."""
        held, self._held = self._held, ""
        self._node = 0
        return held
