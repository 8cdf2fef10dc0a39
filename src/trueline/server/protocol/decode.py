"""Decodes bodies to structs; errors name the field."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TypeVar, cast

import msgspec

from trueline.errors import did_you_mean
from trueline.server.protocol.bodies import Body
from trueline.server.protocol.errors import ApiError, bad_request
from trueline.server.protocol.forms import FREE
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.shape import SMALL, check_shape
from trueline.utils.json_types import JSON, JsonValue

_WHERE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$?([^`]*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`", re.DOTALL)
_TYPES = re.compile(r"Expected `(.*)`, got `(.*)`")
_ENUM = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_VALUE = re.compile(r"Invalid value (.*)", re.DOTALL)
_TOO_LONG = re.compile(r"Expected `(array|object|str)` of length <= \d+")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}

MAX_QUOTED = 200
"""Characters of msgspec's message: a field's name is a client's, and may be of any length."""
_FREE = ("messages", "input", "tools", "text", "chat_template_kwargs", *FREE)
"""What goes to a template as it is, and schemas."""


T = TypeVar("T", bound=msgspec.Struct)


@cache
def _decoder(body: type[msgspec.Struct]) -> msgspec.json.Decoder[object]:
    return msgspec.json.Decoder(body)


def decode(body: type[T], data: bytes, limits: RequestLimits) -> T:
    check_shape(data, limits.max_values)
    try:
        try:
            return cast("T", _decoder(body).decode(data))
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
        # JSON knows one kind of number: 16.0 is a whole one, and some clients write it so
        found = {
            name: value if name in _FREE else _with_wholes(value)
            for name, value in msgspec.json.decode(data, type=JSON).items()
        }
        return msgspec.convert(found, body, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explained(_shortened(str(error), MAX_QUOTED), body, data) from None
    except RecursionError:
        raise bad_request("the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(str(error), data) from None


def _shortened(text: str, length: int) -> str:
    """Without its middle, where it is longer."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def _with_wholes(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_wholes(part) for part in value]
        case dict():
            return {name: _with_wholes(part) for name, part in value.items()}
        case _:
            return value


def _not_json(message: str, data: bytes) -> ApiError:
    if len(data) >= SMALL:  # a second opinion would hold up others
        return bad_request(f"the body is not JSON: {message}")
    try:
        json.loads(data.decode())
    except UnicodeDecodeError as error:
        return bad_request(f"the body is not UTF-8: byte {error.start} begins no character")
    except json.JSONDecodeError as error:
        return bad_request(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        )
    except RecursionError:
        return bad_request("the body is nested too deep")
    # what Python takes and msgspec does not
    if "byte" in message:
        return bad_request(f"the body is not JSON: {message}")
    return bad_request("the body has half of a surrogate pair; accepted: whole Unicode characters")


@cache
def _accepted(body: type) -> dict[str, str]:
    """What each field takes, in words."""
    _, parts = msgspec.json.schema_components([body])
    fields: dict[str, JSON] = parts[body.__name__]["properties"]
    return {name: field["description"] for name, field in fields.items() if "description" in field}


def _length(kind: str, head: str, data: bytes) -> str:
    """Of the field, or of the longest text in it."""
    value = msgspec.json.decode(data, type=JSON)[head]
    if kind == "str":
        texts = [value] if isinstance(value, str) else value
        return f"{max(len(text) for text in texts if isinstance(text, str))} characters"
    return f"{len(value)} entries"


def _explained(message: str, body: type, data: bytes) -> ApiError:
    """msgspec's message as an error that names the field and what it accepts."""
    found = _WHERE.fullmatch(message)
    assert found is not None
    what, path = found[1], (found[2] or "").replace("[...]", "").removeprefix(".")
    field = _FIELD.fullmatch(what)
    if field:
        param = f"{path}.{field[1]}" if path else field[1]
    else:
        param = path
    head = re.split(r"[.\[]", param)[0]
    accepted = _accepted(body).get(head)
    if issubclass(body, Body) and head in body.not_offered:
        return bad_request(f"{head} is not offered yet; accepted: {accepted}", head)
    if field and "unknown" in what:
        return _unknown(param, path, body)
    if field:
        return bad_request(
            f"{param} is missing" + (f"; accepted: {accepted}" * bool(accepted)), param
        )
    types = _TYPES.fullmatch(what)
    given = f"found {_in_words(types[2])}; " if types else ""
    if too_long := _TOO_LONG.fullmatch(what):
        given = f"found {_length(too_long[1], head, data)}; "
    if (enum := _ENUM.fullmatch(what)) and accepted is not None:
        return bad_request(f"{param}: found {enum[1]}; accepted: {accepted}", param)
    if not param:
        return bad_request(f"the body: {given}accepted: a JSON object")
    if "." in param or accepted is None:  # a field within: msgspec knows better
        accepted = _in_words(types[1]) if types else what.replace("`", "")
    return bad_request(f"{param}: {given}accepted: {accepted}", param)


def converted(kind: type[T], value: JSON, where: str, parts: str) -> T:
    """A list's item of a kind that its `type` says; `where` it stands in the request. `parts`: the
    types that the items of its own lists may have."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = _shortened(str(error), MAX_QUOTED)
    found = _WHERE.fullmatch(message)
    assert found is not None
    what, place = found[1], where + (found[2] or "")
    if field := _FIELD.fullmatch(what):
        place = f"{place}.{field[1]}"
        if "unknown" in what:
            raise bad_request(f"{place} is not known", place, "unknown_field")
        raise bad_request(f"{place} is missing", place)
    if types := _TYPES.fullmatch(what):
        told = f"found {_in_words(types[2])}; accepted: {_in_words(types[1])}"
    elif (value_found := _VALUE.fullmatch(what)) and place.endswith("].type"):
        told = f"found {value_found[1]}; accepted: {parts}"
    else:
        told = what.replace("`", "")
    raise bad_request(f"{place}: {told}", place)


def _unknown(param: str, path: str, body: type) -> ApiError:
    known: tuple[str, ...] = () if path else body.__struct_fields__  # type: ignore[attr-defined]
    return bad_request(f"{param} is not known{did_you_mean(param, known)}", param, "unknown_field")


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))
