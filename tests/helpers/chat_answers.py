"""Answers of models with calls in them, written here a second time and told apart from the parsers:
what was meant is known before anything is parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from trueline.text.formats.choose import CALLS, REASONING
from trueline.text.formats.events import Arguments as Piece
from trueline.text.formats.events import (
    CallEnd,
    CallStart,
    Content,
    Event,
    Malformed,
    Reasoning,
    joined,
)
from trueline.text.formats.markers import Markers
from trueline.text.formats.parser import ChatFormat, ChatParser
from trueline.text.formats.values import Functions

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "thing": {"$ref": "#/$defs/thing"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"thing": {"type": "object"}},
}
NOTHING = {"type": "object", "properties": {}}
FUNCTIONS = Functions({"get_weather": SCHEMA, "now": NOTHING, "f": {}})


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_calls(syntax: str, calls: Sequence[Call], m: Callable[[str], str] = str) -> str:
    """As the format's template or encoding writes them. `m` makes of each mark what is to stand
    there for it; values are left alone."""
    match syntax:
        case "deepseek_v3":
            parts = [
                m("<｜tool▁call▁begin｜>function<｜tool▁sep｜>")
                + f"{c.name}\n```json\n{as_json(c.arguments)}\n```{m('<｜tool▁call▁end｜>')}"
                for c in calls
            ]
            return m("<｜tool▁calls▁begin｜>") + "\n".join(parts) + m("<｜tool▁calls▁end｜>")
        case "deepseek_v31":
            parts = [
                f"{m('<｜tool▁call▁begin｜>')}{c.name}{m('<｜tool▁sep｜>')}{as_json(c.arguments)}"
                + m("<｜tool▁call▁end｜>")
                for c in calls
            ]
            return m("<｜tool▁calls▁begin｜>") + "".join(parts) + m("<｜tool▁calls▁end｜>")
        case "kimi_k2":
            parts = [
                f"{m('<|tool_call_begin|>')}functions.{c.name}:{i}"
                f"{m('<|tool_call_argument_begin|>')}{as_json(c.arguments)}{m('<|tool_call_end|>')}"
                for i, c in enumerate(calls)
            ]
            start, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
            return m(start) + "".join(parts) + m(end)
        case "hermes":
            parts = [as_json({"name": c.name, "arguments": c.arguments}) for c in calls]
            return "\n".join(f"{m('<tool_call>')}\n{p}\n{m('</tool_call>')}" for p in parts)
        case "glm45" | "glm47":
            return _glm(calls, m, "\n" if syntax == "glm45" else "")
        case _:
            return _dsml(calls, m, {"deepseek_v32": "function_calls"}.get(syntax, "tool_calls"))


def _glm(calls: Sequence[Call], m: Callable[[str], str], end: str) -> str:
    found = [
        f"{m('<tool_call>')}{c.name}{end}"
        + "".join(
            f"{m('<arg_key>')}{k}{m('</arg_key>')}{end}{m('<arg_value>')}"
            f"{v if isinstance(v, str) else as_json(v)}{m('</arg_value>')}{end}"
            for k, v in c.arguments.items()
        )
        + m("</tool_call>")
        for c in calls
    ]
    return end.join(found)


def _dsml(calls: Sequence[Call], m: Callable[[str], str], block: str) -> str:
    d = m("｜DSML｜")
    invokes = [
        f'<{d}invoke name="{c.name}">\n'
        + "".join(
            f'<{d}parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
            f"{v if isinstance(v, str) else as_json(v)}</{d}parameter>\n"
            for k, v in c.arguments.items()
        )
        + f"</{d}invoke>"
        for c in calls
    ]
    return f"<{d}{block}>\n" + "\n".join(invokes) + f"\n</{d}{block}>"


def chat_format(syntax: str) -> ChatFormat:
    reasoning = REASONING["kimi_k2" if syntax == "kimi_k2" else "think"]
    return ChatFormat(reasoning, CALLS[syntax])


def markers(form: ChatFormat, *, as_tokens: bool) -> Markers:
    return Markers(
        form.spellings, {s: i for i, s in enumerate(form.spellings)} if as_tokens else {}
    )


def parse(
    form: ChatFormat,
    pieces: Sequence[str],
    *,
    as_tokens: bool = False,
    thinking: bool = False,
    functions: Functions | None = FUNCTIONS,
) -> list[Event]:
    """`pieces` as the parser sees them."""
    parser = ChatParser(form, markers(form, as_tokens=as_tokens), functions, thinking=thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def cut(text: str, places: set[int]) -> list[str]:
    edges = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in pairwise(edges)]


def check_calls(events: Sequence[Event]) -> None:
    """What holds of every answer: a call that started ends, once, with whole arguments; or is
    told as malformed, and has none that are whole."""
    open_calls: dict[int, str] = {}
    ended = []
    for event in events:
        match event:
            case CallStart(index):
                assert index == len(open_calls) + len(ended)
                open_calls[index] = ""
            case Piece(index, text):
                open_calls[index] += text
            case CallEnd(index):
                assert isinstance(json.loads(open_calls.pop(index)), dict)
                ended.append(index)
            case Malformed(index, reason, text):
                assert reason
                assert text
                if index is not None:
                    assert not is_json(open_calls.pop(index))
                    ended.append(index)
            case Content(text) | Reasoning(text):
                assert text
    assert not open_calls


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def calls_of(events: Sequence[Event]) -> Iterator[Call]:
    started: dict[int, CallStart] = {}
    written: dict[int, str] = {}
    for event in events:
        match event:
            case CallStart(index):
                started[index], written[index] = event, ""
            case Piece(index, text):
                written[index] += text
            case CallEnd(index):
                yield Call(started[index].name, json.loads(written[index]))


# -- made by hypothesis ----------------------------------------------------------------------------

TRAPS = (
    *("<", "</", "<think", "</think>", "<tool_call", "</arg_value", "<｜DSML｜", "<｜tool", "```"),
    *("{", "}", '"', '\\"', "\\u00e9", "\\", "\n", " ", "\t", "é", "日", "😀", "\ufffd", "a", "1"),
    *("<|tool_call", "null", "[", "NaN", "</｜DSML｜", '">'),
)
"""What may go wrong in a text: the beginnings of marks, escapes, characters of several bytes."""
TEXTS = st.lists(st.sampled_from(TRAPS), max_size=12).map("".join)
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<｜|`"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS | PLAIN,
        "number": st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9),
        "flag": st.booleans(),
        "list": st.lists(JSON_VALUES, max_size=3),
        "thing": st.dictionaries(PLAIN, JSON_VALUES, max_size=3),
        "maybe": st.none() | PLAIN.filter(lambda text: text.strip() != "null"),
    },
)
A_CALL = st.builds(Call, st.just("get_weather"), ARGUMENTS) | st.just(Call("now", {}))
SYNTAXES = st.sampled_from(sorted(CALLS))
CUTS = st.sets(st.integers(0, 400), max_size=12)


@st.composite
def answers(draw: st.DrawFn, syntax: str) -> str:
    """Whole ones, and such as no model should write: parts of calls in any order, cut off
    anywhere."""
    form = chat_format(syntax)
    calls = write_calls(syntax, draw(st.lists(A_CALL, min_size=1, max_size=3)))
    spots = sorted(draw(st.sets(st.integers(0, len(calls)), max_size=4)))
    parts = [calls[a:b] for a, b in pairwise([0, *spots, len(calls)])]
    found = ""
    for part in parts:
        what = draw(st.sampled_from(("keep",) * 6 + ("drop", "twice", "trap", "mark")))
        found += {"keep": part, "drop": "", "twice": part * 2}.get(what, part)
        if what == "trap":
            found += draw(TEXTS)
        if what == "mark":
            assert form.calls is not None
            found += draw(st.sampled_from((*form.spellings, *form.calls.opens)))
    return draw(TEXTS) + draw(st.sampled_from(("", "</think>", "<think>x</think>"))) + found
