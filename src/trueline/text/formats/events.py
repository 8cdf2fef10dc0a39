"""What a chat format's parser finds in an answer, in order. Pieces that follow each other are one:
however the text was cut, joined they are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str | None
    """The format's own; None where it has none."""
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, as JSON text. The brace that closes them comes only with the
    end of the call: a call that breaks off never has whole ones."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be made: `text` is all of it as it was written. With an `index`, the call
    had started."""

    index: int | None
    reason: str
    text: str


Event: TypeAlias = Reasoning | Content | CallStart | Arguments | CallEnd | Malformed


def joined(events: list[Event]) -> list[Event]:
    """With pieces that follow each other made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
