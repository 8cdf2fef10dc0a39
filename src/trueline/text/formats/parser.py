"""The parser of a chat's answer: reasoning, content and calls, as they come.

A generator reads the answer from its beginning; `push` gives it more, `finish` says that there
is no more. White space that a format puts around its markers is none of the text: what stands
around reasoning, and behind content that only calls follow, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trueline.text.formats.calls import CallReader, CallSyntax
from trueline.text.formats.events import Content, Event, Reasoning
from trueline.text.formats.markers import Markers
from trueline.text.formats.reader import Reader, Reading, literals
from trueline.text.formats.values import Functions


@dataclass(frozen=True)
class ReasoningSyntax:
    """Between what marks a model puts its reasoning."""

    name: str = "think"
    open: str = "<think>"
    close: str = "</think>"
    ended_by_calls: bool = False
    """Whether calls end it too; else what looks like calls is part of it."""


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes its answers."""

    reasoning: ReasoningSyntax | None = None
    calls: CallSyntax | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        own = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        return (*own, *(self.calls.spellings if self.calls else ()))


class ChatParser:
    """`functions`: what may be called; without them calls are content. `thinking`: whether the
    prompt has opened the reasoning. `hidden`: markers that content does not show."""

    def __init__(
        self,
        format: ChatFormat,
        markers: Markers,
        functions: Functions | None,
        *,
        thinking: bool,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        assert format.reasoning or not thinking
        self._reasoning, self._markers, self._hidden = format.reasoning, markers, hidden
        self.thinking = thinking
        """Whether what comes next is reasoning, as far as is known."""
        self._reader = Reader()
        self._events: list[Event] = []
        self._calls = format.calls if functions is not None else None
        self._call_reader = CallReader(
            self._reader, markers, functions or Functions({}), self._events.append
        )
        self._reasoned, self._said = _Trimmed(self._reason), _Trimmed(self._say)
        self._reasoned.trims = thinking
        self._called = False
        """Since the last content."""
        self._running = self._run()
        next(self._running, None)

    def push(self, text: str) -> list[Event]:
        """What is certain now and was not before. `text` has the characters of `Markers` in place
        of tokens that are markers."""
        self._reader.text += text
        return self._go_on()

    def finish(self) -> list[Event]:
        self._reader.ended = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._running, None)
        found = self._events.copy()
        self._events.clear()
        return found

    def _run(self) -> Reading[None]:
        if self._reasoning and not self.thinking:
            yield from self._at_start(self._reasoning)
        while True:
            ended = yield from (self._read_reasoning() if self.thinking else self._read_content())
            if ended:
                return

    def _at_start(self, reasoning: ReasoningSyntax) -> Reading[None]:
        """Here, and here alone, a marker that is no token opens the reasoning: further on it may be
        spoken of."""
        space = yield from self._reader.space()
        marks = self._call_reader.literals(reasoning.open)
        if (yield from self._reader.expect(marks)) is not None:
            self._think()
        elif space:
            self._content(space)

    def _think(self) -> None:
        self.thinking = self._reasoned.trims = True

    def _read_reasoning(self) -> Reading[bool]:
        assert self._reasoning is not None
        opens = self._calls.opens if self._calls and self._reasoning.ended_by_calls else ()
        close = self._markers.seen(self._reasoning.close)
        marks = self._call_reader.literals(self._reasoning.close, *opens)
        found = yield from self._reader.until(marks, self._reasoned.push)
        self._reasoned.end(keeps=found is None)
        if found is None:
            return True
        self.thinking = False
        self._said.trims = True
        if found != close:
            yield from self._read_calls(found)
        return False

    def _read_content(self) -> Reading[bool]:
        opens = tuple(map(self._markers.seen, self._calls.opens if self._calls else ()))
        marks, thinks = opens, ""
        if self._reasoning and self._markers.is_token(self._reasoning.open):
            thinks = self._markers.seen(self._reasoning.open)
            marks = (*marks, thinks)
        if self._reasoning and self._markers.is_token(self._reasoning.close):
            marks = (*marks, self._markers.seen(self._reasoning.close))
        found = yield from self._reader.until(literals(*marks), self._content)
        if found is None:
            self._said.end(keeps=not self._called)
            return True
        if found == thinks:
            self._said.end(keeps=True)
            self._think()
        elif found in opens:
            yield from self._read_calls(found)
        return False

    def _read_calls(self, opened: str) -> Reading[None]:
        assert self._calls is not None
        self._called = True
        yield from self._calls.read(self._call_reader, opened)

    def _content(self, text: str) -> None:
        if self._calls:
            self._said.push(text)
        else:
            self._said.pass_on(text)

    def _reason(self, text: str) -> None:
        if text := self._markers.spelled(text, self._hidden):
            self._events.append(Reasoning(text))

    def _say(self, text: str) -> None:
        self._called = False
        if text := self._markers.spelled(text, self._hidden):
            self._events.append(Content(text))


class _Trimmed:
    """Text whose last white space waits for what follows; at the beginning it may be left out."""

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self.trims = False
        """Whether white space that comes now is left out."""
        self._held: list[str] = []

    def push(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self.pass_on("".join(self._held) + body)
            self._held.clear()
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def pass_on(self, text: str) -> None:
        """Without holding its end."""
        if self.trims:
            text = text.lstrip()
            if not text:
                return
            self.trims = False
        self._found(text)

    def end(self, *, keeps: bool) -> None:
        if keeps and self._held:
            self.pass_on("".join(self._held))
        self._held.clear()
