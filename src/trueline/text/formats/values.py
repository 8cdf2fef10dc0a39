"""Parameters that a model writes one by one, as text: their JSON, by the function's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, TypeAlias

from trueline.text.formats.json_text import JsonText
from trueline.utils.json_types import JSON, JsonValue

Types: TypeAlias = frozenset[str] | None
"""JSON types that a value may have; None where nobody says."""
TEXT = frozenset({"string"})
NO_TEXT = frozenset({"object", "array", "number", "integer", "boolean", "null"})
_ALL = {"string", *NO_TEXT}
MOST_STEPS = 64
"""Of references and alternatives within a parameter's schema that are looked at."""


def types_of(schema: JsonValue, root: JsonValue) -> Types:
    return _Types(root).of(schema)


class _Types:
    def __init__(self, root: JsonValue) -> None:
        self._root, self._left = root, MOST_STEPS

    def of(self, schema: JsonValue) -> Types:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return None
        if "$ref" in schema:
            return self.of(_referred(self._root, schema["$ref"]))
        said = schema.get("type")
        named = {said} if isinstance(said, str) else _texts(said)
        if named and named <= _ALL:
            return frozenset(named)
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(values, list) and values:
                return frozenset(map(json_type, values))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._any(schema[key])
        if isinstance(schema.get("allOf"), list):
            found = [types for part in schema["allOf"] if (types := self.of(part)) is not None]
            return frozenset.intersection(*found) if found else None
        if "properties" in schema:
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else None

    def _any(self, parts: list[JsonValue]) -> Types:
        found = [self.of(part) for part in parts]
        known = [types for types in found if types is not None]
        return frozenset.union(*known) if known and len(known) == len(found) else None


def _texts(value: object) -> set[str]:
    items = value if isinstance(value, list) else []
    return {item for item in items if isinstance(item, str)}


def _referred(root: JsonValue, reference: object) -> JsonValue:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: JsonValue = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def json_type(value: JsonValue) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


class ParameterText:
    """One value as JSON text, as it comes: a text is escaped piece by piece, lists and objects are
    passed on; a number or a word, and a value that may be a text or something else, only at the
    end."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._mode: Literal["text", "begin", "value", "whole"]
        if types == TEXT:
            self._mode = "text"
        else:
            self._mode = "whole" if types is None or "string" in types else "begin"
        self._held: list[str] = []
        self._begun = False
        self._value = JsonText()
        self._unread = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What can be passed on, and what is wrong."""
        if self._mode == "text":
            head, self._begun = "" if self._begun else '"', True
            return head + json.dumps(text, ensure_ascii=False)[1:-1], None
        if self._mode == "begin":
            self._held.append(text)
            start = "".join(self._held).lstrip()
            if not start:
                return "", None
            self._mode = "value" if start[0] in "{[" else "whole"
            if self._mode == "whole":
                self._held = [start]
                return "", None
            text = start
        if self._mode == "whole":
            self._held.append(text)
            return "", None
        return self._pass(text, ended=False)

    def finish(self) -> tuple[str, str | None]:
        if self._mode == "text":
            return ('"' if self._begun else '""'), None
        if self._mode == "value":
            piece, error = self._pass("", ended=True)
            return piece, error or (None if self._value.done else "not JSON: it ends too early")
        return self._decided("".join(self._held)), None

    def _pass(self, text: str, *, ended: bool) -> tuple[str, str | None]:
        self._unread += text
        if self._value.done:
            return "", "not JSON: more follows" if self._unread.strip() else None
        count = self._value.feed(self._unread, ended)
        self._unread = self._unread[count:]
        error = self._value.error
        if self._value.done and self._unread.strip():
            error = "not JSON: more follows"
        return self._value.taken(), error

    def _decided(self, text: str) -> str:
        """JSON of a type that it may have, where the text is that; else a text."""
        value, types = read_json(text), self._types
        kind = None if value is NOT_JSON else json_type(value)
        if types is None:
            is_value = kind not in (None, "string")
        elif "string" in types:
            fits = kind in types or (kind == "integer" and "number" in types)
            is_value = fits and kind != "string"
        else:
            word = PYTHON_WORDS.get(text.strip())
            if word is not None and not types.isdisjoint(("boolean", "null")):
                return word
            is_value = kind is not None
        return text.strip() if is_value else json.dumps(text, ensure_ascii=False)


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Models write them where JSON's words are meant; a parameter that may be a text keeps them."""
NOT_JSON = object()


def read_json(text: str) -> JsonValue:
    """NOT_JSON where it is none."""
    check = JsonText()
    rest = text[check.feed(text, True) :]
    if not check.done or rest.strip(" \t\n\r"):
        return NOT_JSON
    try:
        return json.loads(check.taken())
    except ValueError:  # a number of more digits than Python reads
        return NOT_JSON


class Functions:
    """The functions that a request offers: name → the schema of its parameters."""

    def __init__(self, schemas: Mapping[str, JSON]) -> None:
        self._schemas = schemas

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def types(self, function: str, parameter: str) -> Types:
        schema = self._schemas.get(function)
        properties = schema.get("properties") if schema is not None else None
        if not isinstance(properties, Mapping) or parameter not in properties:
            return None
        return types_of(properties[parameter], schema)
