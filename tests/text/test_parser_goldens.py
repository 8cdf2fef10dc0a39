"""What public engines' parsers read in the same answers (goldens/parsers.json says which). Where we
read something else, it is meant, and said here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat_answers import Call, calls_of, chat_format, parse
from trueline.text.formats.choose import CALLS
from trueline.text.formats.events import Content, Malformed
from trueline.text.formats.values import Functions

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "parsers.json").read_text())
FUNCTIONS = Functions(GOLDENS["functions"])
KEPT = ("text behind",)
"""They drop what is said behind calls."""
BROKEN_OFF = ("broken off at 2 of 6", "broken off at 3 of 6", "broken off at 5 of 6")
"""They drop it, or make a call of it whose arguments nobody wrote."""
MALFORMED = (
    "broken JSON",
    "an array of arguments",
    "nothing for arguments",
    "the same parameter twice",
    "parameter without a value",
)
"""They pass on arguments that no function takes, or others than were written."""
UNKNOWN = "function nobody declared"
"""They call it."""
NULL = ("Python's None", "None for a number")
"""They make a text of it, though DeepSeek's formats say that the value is none."""
CASES = [(syntax, name) for syntax, cases in GOLDENS["cases"].items() for name in cases]


def read(syntax: str, text: str) -> tuple[str, list[Call]]:
    events = parse(chat_format(syntax), [text], functions=FUNCTIONS)
    content = "".join(event.text for event in events if isinstance(event, (Content, Malformed)))
    return content.strip(), list(calls_of(events))


def public(case: dict[str, Any]) -> list[tuple[str, list[Call]]]:
    return [(text, [Call(*call) for call in calls]) for text, calls in case["read"]]


@pytest.mark.parametrize(("syntax", "name"), CASES)
def test_calls_are_read_as_public_parsers_read_them(syntax: str, name: str) -> None:
    case = GOLDENS["cases"][syntax][name]
    content, calls = read(syntax, case["text"])
    if name in KEPT:
        assert any(calls == theirs for _, theirs in public(case))
        assert content == "Done."
    elif name in BROKEN_OFF:
        assert case["text"].endswith(content)
        assert calls in ([], [Call("get_weather", {"city": "Rome"})])
        assert content or calls
    elif name in MALFORMED:
        assert not calls
        assert content in case["text"]
        assert "get_weather" in content
    elif name == UNKNOWN:
        assert not calls
        assert "missing" in content
    elif name in NULL and 'string="false"' in case["text"]:
        assert (content, [list(call.arguments.values()) for call in calls]) == ("", [[None]])
    else:
        assert (content, calls) in public(case)


def test_every_format_has_its_answers() -> None:
    assert GOLDENS["cases"].keys() == CALLS.keys()


@pytest.mark.parametrize("name", [*KEPT, *BROKEN_OFF, *MALFORMED, UNKNOWN, *NULL])
def test_what_is_read_otherwise_is_read_otherwise(name: str) -> None:
    """Else it needs no exception."""
    found = [(s, cases[name]) for s, cases in GOLDENS["cases"].items() if name in cases]
    assert any(read(syntax, case["text"]) not in public(case) for syntax, case in found)
