"""Rules of a grammar in the making, in llguidance's Lark. A format's marks are tokens where the
vocabulary has them, and nothing else is taken for one then; else they are their spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import msgspec

from trueline.grammar.json_strict import strict
from trueline.utils.json_types import JSON

ANY = "(?s:.*)"
"""Any text, as a regular expression."""


def literal(text: str) -> str:
    return json.dumps(text)  # all escaped: Lark has no DEL as it is


_META = frozenset("\\.+*?()|[]{}^$#&-~/")


def escaped(text: str) -> str:
    """As a regular expression between slashes."""
    return "".join(
        f"\\{char}" if char in _META else char if char.isprintable() else f"\\x{{{ord(char):X}}}"
        for char in text
    )


class Rules:
    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: the marks that are tokens."""
        self._tokens = tokens
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._any = re.compile(f"({'|'.join(longest_first)})") if tokens else None
        self._names: dict[tuple[str, str], str] = {}

    def text(self, start: str) -> str:
        rules = [f"{name}{more}: {body}" for (body, more), name in self._names.items()]
        return "\n".join([f"start: {start}", *rules, ""])

    def rule(self, body: str, more: str = "") -> str:
        """The name of a rule; equal ones are one."""
        return self._names.setdefault((body, more), f"r{len(self._names)}")

    def terminal(self, body: str, more: str = "") -> str:
        name = self._names.setdefault((body, ""), f"T{len(self._names)}")
        return self.rule(name, more) if more else name

    def split(self, text: str) -> list[str]:
        """Texts, and between them marks that are tokens: every second one."""
        return self._any.split(text) if self._any else [text]

    def written(self, text: str) -> str:
        """What the format writes, word for word."""
        parts = [
            f"<[{self._tokens[part]}]>" if i % 2 else literal(part)
            for i, part in enumerate(self.split(text))
            if part
        ]
        return " ".join(parts) or '""'

    def json(self, schema: JSON) -> str:
        """JSON that the schema accepts, as `json_grammar` has it."""
        kept, letters = strict(msgspec.json.decode(msgspec.json.encode(schema)))
        options = {} if letters is None else {"x-guidance": {"json_allowed_escapes": letters}}
        return self.rule(f"%json {msgspec.json.encode(options | kept).decode()}")

    def until(self, terminal: str, close: str, others: Iterable[str] = ()) -> str:
        """A text of this `terminal`, and the mark that closes it. `others`: what may not be in it
        either. Tokens are in no text; the letters before one may be, and it goes on from there."""
        parts = self.split(close)
        if len(parts) > 1:
            head, token, rest = parts[0], parts[1], "".join(parts[2:])
            found = self.terminal(f"({terminal}) {literal(head)}" if head else terminal)
            return f"{found} {self.written(token + rest)}"
        body = f"(({terminal}) {literal(close)}) & ~/{ANY}{escaped(close)}(?s:.+)/"
        for other in others:
            body += f" & ~/{ANY}{escaped(other)}{ANY}/"
        return self.terminal(body, "[lazy]")

    def before(self, mark: str) -> str:
        """Free text up to the mark, and the mark."""
        head, *rest = self.split(mark)
        if rest:
            return f"{self.terminal(f'/{ANY}{escaped(head)}/')} {self.written(''.join(rest))}"
        return self.terminal(f"/{ANY}{escaped(mark)}/", "[lazy]")

    def without(self, marks: Iterable[str]) -> str:
        """Free text to its end, without these."""
        no = "".join(
            f" & ~/{ANY}{escaped(mark)}{ANY}/" for mark in marks if len(self.split(mark)) == 1
        )
        return self.terminal(f"/{ANY}/{no}")
