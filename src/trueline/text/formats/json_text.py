"""JSON text that comes in pieces: passes it on as it comes, and stops where it is none.

A control character within a string, which JSON does not have and models do write, is passed on as
its escape.
"""

from __future__ import annotations

import json
import re

MOST_NESTED = 128
MOST_DIGITS = 400
"""Characters of a number: it is passed on whole, so it has to end."""
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_OPENERS = {"{": "}", "[": "]"}


class JsonText:
    def __init__(self) -> None:
        self.done = False
        self.error: str | None = None
        self._out: list[str] = []
        self._closers: list[str] = []
        self._next = "value"
        """What may come: value, item (or an end), key (or an end), name, colon, comma (or an end),
        text."""
        self._is_name = False

    def taken(self) -> str:
        """What was read since the last call, as it is to be passed on."""
        out, self._out = "".join(self._out), []
        return out

    def feed(self, text: str, ended: bool) -> int:
        """Reads from the beginning of `text`, and gives how far; the rest is to come again, with
        more behind it."""
        place = 0
        while not self.done and self.error is None:
            if self._next != "text":
                space = _SPACE.match(text, place)
                if space and space.end() > place:
                    self._out.append(space[0])
                    place = space.end()
            if place == len(text):
                break
            step = self._text(text, place) if self._next == "text" else self._token(
                text, place, ended
            )  # fmt: skip
            if step == 0:
                break
            place += step
        return place

    def _fail(self, what: str) -> int:
        self.error = f"not JSON: {what}"
        return 0

    def _pass(self, text: str) -> int:
        self._out.append(text)
        return len(text)

    def _token(self, text: str, place: int, ended: bool) -> int:
        char = text[place]
        if self._closers and char == self._closers[-1] and self._next in ("item", "key", "comma"):
            self._closers.pop()
            self._after_value()
            return self._pass(char)
        if self._next in ("key", "name"):
            if char != '"':
                return self._fail("a name in an object begins with a quotation mark")
            self._is_name, self._next = True, "text"
            return self._pass(char)
        if self._next in ("colon", "comma"):
            if char != {"colon": ":", "comma": ","}[self._next]:
                return self._fail(f"no {self._next} where one belongs")
            within = self._closers[-1]
            self._next = "value" if self._next == "colon" or within == "]" else "name"
            return self._pass(char)
        return self._value(text, place, ended)

    def _value(self, text: str, place: int, ended: bool) -> int:
        char = text[place]
        if char == '"':
            self._is_name, self._next = False, "text"
            return self._pass(char)
        if char in _OPENERS:
            if len(self._closers) == MOST_NESTED:
                return self._fail(f"nested deeper than {MOST_NESTED}")
            self._closers.append(_OPENERS[char])
            self._next = "key" if char == "{" else "item"
            return self._pass(char)
        match = _SCALAR.match(text, place)
        scalar = match[0] if match else ""
        if len(scalar) > MOST_DIGITS:
            return self._fail(f"a number of more than {MOST_DIGITS} characters")
        if scalar and place + len(scalar) == len(text) and not ended:
            return 0  # more of it may come
        if scalar not in _WORDS and not _NUMBER.fullmatch(scalar):
            return self._fail("no value where one belongs")
        self._after_value()
        return self._pass(scalar)

    def _text(self, text: str, place: int) -> int:
        if match := _PLAIN.match(text, place):
            return self._pass(match[0])
        char = text[place]
        if char == '"':
            if self._is_name:
                self._next = "colon"
            else:
                self._after_value()
            return self._pass(char)
        if char == "\\":
            if match := _ESCAPE.match(text, place):
                return self._pass(match[0])
            begun = _ESCAPE_BEGUN.match(text, place)
            if begun and begun.end() == len(text):
                return 0
            return self._fail("an escape that there is not")
        if char < " ":
            self._out.append(json.dumps(char)[1:-1])
            return 1
        return self._fail("a marker within a string")

    def _after_value(self) -> None:
        self._next = "comma"
        self.done = not self._closers
