"""Calls in a chat's history. Clients write their arguments as JSON text; templates want that text,
or an object. Which, a template shows by what it makes of a call that we put before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from trueline.errors import UsageError, short_repr
from trueline.utils.json_types import JSON, JsonValue

MAX_ARGUMENTS = 1 << 20
"""Characters of one call's arguments, as text."""
Form: TypeAlias = Literal["text", "object", "hidden"]
"""hidden: the template shows no calls."""
Render: TypeAlias = Callable[[str, JSON], str]
_KEY, _VALUE = "key_of_a_probe", "value_of_a_probe"
_TEXT = json.dumps({_KEY: _VALUE})


def check_calls(messages: Sequence[JSON]) -> list[JSON]:
    """The messages, whose calls have arguments that are an object, or the text of one. Ids are
    texts, or left out: not every template asks for them."""
    for i, message in enumerate(messages):
        _check_id(f"messages[{i}].tool_call_id", message.get("tool_call_id"))
    return [
        _checked(f"messages[{i}]", message) if "tool_calls" in message else message
        for i, message in enumerate(messages)
    ]


def _check_id(where: str, value: JsonValue) -> None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where} = {short_repr(value)}: accepted: a text")


def _checked(where: str, message: JSON) -> JSON:
    calls = message["tool_calls"]
    if calls is None or calls == []:  # as SDKs write that there are none
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        raise UsageError(f"{where}.tool_calls = {short_repr(calls)}: accepted: a list of calls")
    for i, call in enumerate(calls):
        place = f"{where}.tool_calls[{i}]"
        given = call if isinstance(call, Mapping) else {}
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise UsageError(
                f"{place} = {short_repr(call)}: accepted: a call as {{'id': 'call_1', 'type': "
                "'function', 'function': {'name': 'get_weather', 'arguments': '{}'}}"
            )
        _check_id(f"{place}.id", given.get("id"))
        check_arguments(f"{place}.function.arguments", function.get("arguments"))
    return {"content": None} | message  # templates ask whether it is none


def check_arguments(where: str, value: JsonValue) -> None:
    """UsageError where they are no object, nor the text of one."""
    _object(where, value)


def _object(where: str, value: JsonValue) -> JSON:
    """Clients write nothing, or an empty text, for no arguments."""
    if value is None or value == "":
        return {}
    found = value
    if isinstance(value, str):
        if len(value) > MAX_ARGUMENTS:
            raise UsageError(f"{where}: {len(value)} characters; accepted: up to {MAX_ARGUMENTS}")
        try:
            found = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            found = None
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{where} = {short_repr(value)}: accepted: a JSON object, or the text of one"
        )
    return dict(found)


def with_arguments(messages: list[JSON], form: Form) -> list[JSON]:
    """`check_calls`' own, with the arguments of calls in this form."""
    return [
        {**message, "tool_calls": [_formed(call, form) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _formed(call: JSON, form: Form) -> JSON:
    if "function" in call:
        return {**call, "function": _formed(call["function"], form)}
    given = call.get("arguments")
    if form == "object":
        made: JsonValue = _object("arguments", given)
    elif isinstance(given, str) and given:
        made = given  # as it was written: the model's own
    else:
        made = json.dumps(given or {}, ensure_ascii=False)
    return {**call, "arguments": made}


def has_calls(messages: list[JSON]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def form_of(template: str, values: JSON, render: Render) -> Form:
    """What the template takes. One that fails whatever it is given is asked with what it is meant
    to show, so that the error is about that."""
    shown = False
    for content in (None, ""):  # some show calls beside no content alone
        found = {
            form: _shown(template, values, render, content, form) for form in ("text", "object")
        }
        if _TEXT in found["text"]:
            return "text"
        if _KEY in found["object"] and f"'{_KEY}'" not in found["object"]:
            return "object"
        shown = shown or any(found.values())
    return "hidden" if shown else "object"


def _shown(template: str, values: JSON, render: Render, content: str | None, form: str) -> str:
    """A call, put before the template; nothing where it fails."""
    arguments: JsonValue = _TEXT if form == "text" else {_KEY: _VALUE}
    call_id = "functions.probe:0"  # as Kimi's templates want them
    function = {"name": "probe", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": "b"},
    ]
    given = {**values, "messages": messages, "add_generation_prompt": False}
    try:
        return render(template, given)
    except UsageError:
        return ""
