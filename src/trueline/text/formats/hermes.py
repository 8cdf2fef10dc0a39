"""Ling-2.5, Ling-2.6, and others after Hermes and Qwen2.5: a call is a JSON object with its name
and its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from trueline.text.formats.calls import Broken, CallReader
from trueline.text.formats.reader import ENDED, Reading, literals
from trueline.text.formats.values import read_json

CALL, END_CALL = "<tool_call>", "</tool_call>"
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class HermesCalls:
    name: str = "hermes"
    spellings = (CALL, END_CALL)
    opens = (CALL,)
    call_id = None

    def read(self, calls: CallReader, opened: str) -> Reading[None]:
        found: str | None = opened
        while found == opened:
            body = _Call(calls)
            found = yield from calls.call(opened, body.read, calls.literals(END_CALL, CALL))


@dataclass
class _Call:
    calls: CallReader
    started: bool = False
    held: list[str] = field(default_factory=list)
    """Arguments that came before the name."""
    last: str = ""
    """Their last brace."""
    seen: set[str] = field(default_factory=set)

    def read(self) -> Reading[None]:
        calls = self.calls
        yield from calls.expect(literals("{"), "the call is no JSON object")
        while (yield from self._member()) == ",":
            pass
        yield from calls.expect(calls.literals(END_CALL), "more than a JSON object in the call")
        if not self.started:
            raise Broken("it names no function")
        if not self.last:
            raise Broken("it has no arguments")
        calls.arguments(self.last)

    def _member(self) -> Reading[str]:
        """One of the call's members, and what stands behind it."""
        calls = self.calls
        key = yield from self._text("a member's name is no text")
        yield from calls.expect(literals(":"), "no colon behind a member's name")
        meaning = "arguments" if key in ARGUMENTS else key
        if meaning in self.seen:
            raise Broken(f"'{meaning}' is there twice")
        self.seen.add(meaning)
        if meaning == "arguments":
            yield from self._arguments()
        elif meaning == "name":
            calls.start((yield from self._text("its name is no text")))
            self.started = True
            calls.arguments("".join(self.held))
        else:
            yield from self._json(_nothing)
        return (yield from calls.expect(literals(",", "}"), "no end of the call's JSON"))

    def _arguments(self) -> Reading[None]:
        reader = self.calls.reader
        yield from reader.space()
        if not reader.text.startswith('"'):
            if not reader.text.startswith("{"):
                raise Broken("the arguments are no JSON object" if reader.text else ENDED)
            yield from self._json(self._pass)
            return
        written = yield from self._text("")  # JSON within JSON
        if not isinstance(read_json(written), dict):
            raise Broken("the arguments are no JSON object")
        self._pass(written.strip())

    def _pass(self, text: str) -> None:
        text = self.last + text
        self.last = text[-1:]
        if self.started:
            self.calls.arguments(text[:-1])
        else:
            self.held.append(text[:-1])

    def _text(self, wrong: str) -> Reading[str]:
        yield from self.calls.reader.space()
        pieces: list[str] = []
        yield from self._json(pieces.append)
        value = json.loads("".join(pieces))
        if not isinstance(value, str):
            raise Broken(wrong)
        return value

    def _json(self, found: Callable[[str], object]) -> Reading[None]:
        error = yield from self.calls.reader.json(found)
        if error is not None:
            raise Broken(error)


def _nothing(text: str) -> None:
    """Members that mean nothing to us."""
