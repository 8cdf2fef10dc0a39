"""What is said to a model: messages of one line or several, from a terminal or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from trueline.errors import UsageError
from trueline.utils.json_types import JsonValue

FENCE = '"""'
"""Before and after a message of several lines."""


def typed() -> Iterator[str]:
    """Messages of a terminal, with editing and recall where Python has readline."""
    with suppress(ImportError):
        # what is pasted is one message, not one for each of its lines
        import_module("readline").parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            message = _message(input)
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
        except UsageError as error:
            print(f"\n({error})", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
        else:
            yield message


def piped() -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield _message(_stdin_line)


def said(message: str) -> str:
    """A message of the command line; - stands for all of stdin."""
    return literal(read_stdin()) if message == "-" else message


def literal(text: str) -> str:
    """As a line that no first / makes a command."""
    return f"/{text}" if text.startswith("/") else text


def _message(read: Callable[[str], str]) -> str:
    line = read("> ")
    if not line.startswith(FENCE):
        return line
    lines = [line.removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        try:
            lines.append(read("… "))
        except EOFError:
            raise UsageError(f"a message that begins with {FENCE} ends with {FENCE}") from None
    return literal("\n".join(lines).rstrip().removesuffix(FENCE).strip("\n"))


def read_tools(file: Path) -> list[JsonValue]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--tools {file}: {error}") from None
    if not isinstance(found, list):
        raise UsageError(f"--tools {file}: accepted: a list of tools")
    return found


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: no text ({error})") from None


def _stdin_line(_: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: no text ({error})") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")
