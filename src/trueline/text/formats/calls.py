"""What the formats' parsers share: a call in the making, and how one that breaks off is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from trueline.errors import short_repr
from trueline.text.formats.events import Arguments, CallEnd, CallStart, Event, Malformed
from trueline.text.formats.markers import Markers
from trueline.text.formats.reader import ENDED, Literals, Reader, Reading, literals
from trueline.text.formats.values import Functions, ParameterText, Types

LONGEST_NAME = 256
"""Characters of a function's name, and of a parameter's."""


class Broken(Exception):
    """A call that is not what its format says. `stopped`: the marker that was read last, where that
    is what broke it."""

    def __init__(self, reason: str, stopped: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.stopped = reason, stopped


class CallSyntax(Protocol):
    """How a format writes calls. Plain data and one parser; no state."""

    @property
    def name(self) -> str: ...

    @property
    def spellings(self) -> tuple[str, ...]:
        """Markers, or parts of them, that are tokens of the format's own vocabularies."""
        ...

    @property
    def opens(self) -> tuple[str, ...]:
        """What begins calls, in an answer's content."""
        ...

    @property
    def call_id(self) -> str | None:
        """How ids of calls are written in prompts, with {name} and {number}; None where they are
        not."""
        ...

    def read(self, calls: CallReader, opened: str) -> Reading[None]:
        """Reads calls, behind the marker that opened them."""
        ...


class CallReader:
    """Reads one call after the other from `reader`, and says what it finds."""

    def __init__(
        self,
        reader: Reader,
        markers: Markers,
        functions: Functions,
        say: Callable[[Event], None],
    ) -> None:
        self.reader, self.markers, self.functions = reader, markers, functions
        self.say = say
        self.started = 0
        """So many calls have had an index."""
        self._index: int | None = None

    def literals(self, *texts: str) -> Literals:
        return literals(*map(self.markers.seen, texts))

    def call(
        self, opened: str, body: Callable[[], Reading[None]], ends: Literals
    ) -> Reading[str | None]:
        """Reads a call with `body`, which ends with its closing marker. One that breaks off is read
        to the next of `ends`, and told as it was written. The marker that ended it, if it is not
        the call's own: the caller goes on from there."""
        self.reader.keep()
        self._index = None
        stopped: str | None = None
        try:
            yield from body()
        except Broken as broken:
            stopped = broken.stopped
            if stopped is None:
                stopped = yield from self.reader.until(ends, _nothing)
            kept = self.reader.kept()
            if stopped is not None and stopped != ends.texts[0]:
                kept = kept.removesuffix(stopped)
            text = self.markers.spelled(opened + kept)
            self.say(Malformed(self._index, broken.reason, text))
            return None if stopped == ends.texts[0] else stopped
        self.reader.kept()
        self.say(CallEnd(self._required_index()))
        return None

    def section(
        self, opened: str, begin: str, end: str, body: Callable[[], Reading[None]], close: str
    ) -> Reading[None]:
        """Reads calls up to `end`. Each begins with `begin` and ends with `close`. The first one
        may have been `opened` without a section around it."""
        seen_begin, seen_end = self.markers.seen(begin), self.markers.seen(end)
        marks, ends = self.literals(begin, end), self.literals(close, begin, end)
        bare = opened == seen_begin
        found: str | None = seen_begin if bare else None
        while found != seen_end:
            if found is None:
                yield from self.reader.space()
                found = yield from self.reader.expect(marks)
            if found == seen_begin:
                found = yield from self.call(seen_begin, body, ends)
            elif found is None:
                if bare or self.reader.broke_off(marks):
                    return
                pieces: list[str] = []
                found = yield from self.reader.until(marks, pieces.append)
                text = self.markers.spelled("".join(pieces))
                self.say(Malformed(None, "text where a call should begin", text))
                if found is None:
                    return

    def _required_index(self) -> int:
        assert self._index is not None, "a call that ends has begun"
        return self._index

    # -- for the bodies --------------------------------------------------------------------------

    def name(self, what: str, stops: Literals) -> Reading[tuple[str, str]]:
        """A short text and the marker behind it."""
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            if sum(map(len, pieces)) > LONGEST_NAME:
                raise Broken(f"{what} of more than {LONGEST_NAME} characters")

        stop = yield from self.reader.until(stops, take)
        if stop is None:
            raise Broken(ENDED)
        return self.markers.spelled("".join(pieces)), stop

    def start(self, name: str, call_id: str | None = None) -> None:
        if not name:
            raise Broken("it names no function")
        if name not in self.functions.names:
            raise Broken(f"{short_repr(name)} names none of the functions offered")
        self._index = self.started
        self.started += 1
        self.say(CallStart(self._index, call_id, name))

    def arguments(self, text: str) -> None:
        if text:
            self.say(Arguments(self._required_index(), text))

    def expect(self, accepted: Literals, missing: str) -> Reading[str]:
        """What has to stand here, behind white space that may be."""
        yield from self.reader.space()
        found = yield from self.reader.expect(accepted)
        if found is None:
            raise Broken(ENDED if self.reader.broke_off(accepted) else missing)
        return found

    def object(self, *closers: Literals) -> Reading[None]:
        """Arguments as a JSON object, and the markers behind it, one after the other. The last
        brace is passed on when all of them are there."""
        yield from self.reader.space()
        if not self.reader.text.startswith("{"):
            raise Broken("the arguments are no JSON object" if self.reader.text else ENDED)
        pieces = _ButLast(self.arguments)
        error = yield from self.reader.json(pieces.push)
        if error is not None:
            raise Broken(error)
        for closer in closers:
            yield from self.expect(closer, "more than a JSON object in the arguments")
        self.arguments(pieces.last)

    def parameter(self, types: Types, stops: Literals) -> Reading[str | None]:
        """One parameter's value, and the marker behind it."""
        value = ParameterText(types)

        def take(text: str) -> None:
            self._said(*value.push(self.markers.spelled(text)))

        stop = yield from self.reader.until(stops, take)
        if stop is not None:
            self._said(*value.finish())
        return stop

    def _said(self, text: str, error: str | None) -> None:
        self.arguments(text)
        if error is not None:
            raise Broken(ENDED if self.reader.ended else error)


class Parameters:
    """Parameters that come one by one, as one JSON object."""

    def __init__(self, calls: CallReader) -> None:
        self._calls = calls
        self._names: set[str] = set()

    def begin(self, name: str) -> None:
        if name in self._names:
            raise Broken(f"parameter {name!r} is there twice")
        before = ", " if self._names else "{"
        self._names.add(name)
        self._calls.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")

    def end(self) -> None:
        self._calls.arguments("}" if self._names else "{}")


class _ButLast:
    """Passes on all but the last character."""

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self.last = ""

    def push(self, text: str) -> None:
        text = self.last + text
        self._found(text[:-1])
        self.last = text[-1:]


def _nothing(text: str) -> None:
    """It is kept by the reader."""
