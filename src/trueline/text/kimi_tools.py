"""Kimi-K2.5's tools as its template wants them: types of TypeScript, made of their JSON schemas.

The model's own tokenizer makes them, and gives them to the template as `tools_ts_str`. Where a
schema has no such form, that tokenizer gives nothing, and the template writes all tools as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from trueline.utils.json_types import JSON, JsonValue

ARGUMENT = "tools_ts_str"
INDENT = "  "
NEXT = ",\n"
ROOT = "parameters"
"""The name of the whole, where a part refers to it."""
DEFINITIONS = "#/$defs/"
NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
"""Of types that stand beside others."""
CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


class _NoForm(Exception):
    """Of a schema."""


def declare(tools: Sequence[JsonValue]) -> str | None:
    """None: one of them has no such form."""
    try:
        functions = [
            _function(tool["function"])
            for tool in tools
            if tool.get("type") == "function" and tool.get("function")
        ]
    except (_NoForm, AttributeError, KeyError, TypeError, ValueError):
        return None  # whatever is no schema at all, too
    if not functions:
        return ""
    lines = ("# Tools", "", "## functions", "namespace functions {", *functions, "}", "")
    return "\n".join(lines)


def _function(function: JSON) -> str:
    known = _Known()
    parameters = _Object(function.get("parameters") or {}, known)
    lines = []
    named = known.itself
    if named:
        members = NEXT.join(member.text(INDENT) for member in parameters.members)
        lines.append(f"interface {ROOT} {{{_on_lines(members)}}}")
    for name, schema in list(known.definitions.items()):
        kind = _read(schema, known)
        if description := schema.get("description"):
            lines.append(_comment(description, ""))
        lines.append(f"interface {name} {kind.text('')}")
    if description := function.get("description"):
        lines.append(_comment(description, ""))
    taken = ROOT if named else parameters.text("")
    lines.append(f"type {function.get('name', 'function')} = (_: {taken}) => any;")
    return "\n".join(lines)


def _on_lines(text: str) -> str:
    return f"\n{text}\n" if text else ""


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


class _Known:
    """What a function's schema refers to."""

    def __init__(self) -> None:
        self.definitions: JSON = {}
        self.itself = False

    def name(self, reference: str) -> str:
        if reference == "#":
            self.itself = True
            return ROOT
        name = reference.split("/")[-1]
        if not reference.startswith(DEFINITIONS) or not isinstance(
            self.definitions.get(name), Mapping
        ):
            raise _NoForm
        return name


# -- types -------------------------------------------------------------------------------------


class _Type(Protocol):
    def notes(self, indent: str) -> str:
        """Comments that stand before it: lines, each with its end."""
        ...

    def text(self, indent: str) -> str: ...


class _Plain:
    """A type that is one word or some, whatever is around it."""

    def __init__(self, written: str, schema: JSON | None = None) -> None:
        self._written = written
        self._description, self._limits = _said(schema or {})

    def notes(self, indent: str) -> str:
        return _notes(self._description, self._limits, indent)

    def text(self, indent: str) -> str:
        return self._written


def _said(schema: JSON) -> tuple[str, str]:
    kind = schema.get("type")
    names = CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
    return schema.get("description") or "", ", ".join(
        f"{name}: {schema[name]}" for name in names if name in schema
    )


def _notes(description: str, limits: str, indent: str) -> str:
    found = _comment(description, indent) + "\n" if description else ""
    return found + (f"{indent}// {limits}\n" if limits else "")


class _Member:
    def __init__(self, name: str, kind: _Type, optional: bool, default: JsonValue) -> None:
        self.name, self.optional = name, optional
        self._type, self._default = kind, default

    def text(self, indent: str) -> str:
        notes = self._type.notes(indent)
        if self._default is not None:
            number = isinstance(self._default, int | float)
            shown = repr(self._default) if number else json.dumps(self._default, ensure_ascii=False)
            notes += f"{indent}// Default: {shown}\n"
        mark = "?" if self.optional else ""
        return f"{notes}{indent}{self.name}{mark}: {self._type.text(indent)}"


class _Object:
    def __init__(self, schema: JSON, known: _Known) -> None:
        self._description = schema.get("description") or ""
        known.definitions.update(schema.get("$defs") or {})
        others = schema.get("additionalProperties")
        self._others = _read(others, known) if isinstance(others, Mapping) else _others(others)
        properties = schema.get("properties", {})
        required = set(schema.get("required", [])) if "properties" in schema else set()
        self.members = [
            _Member(
                name,
                _read(part, known),
                name not in required,
                part.get("default") if isinstance(part, Mapping) else None,
            )
            for name, part in properties.items()
        ]

    def notes(self, indent: str) -> str:
        return _notes(self._description, "", indent)

    def text(self, indent: str) -> str:
        inner = indent + INDENT
        members = sorted(self.members, key=lambda member: (member.optional, member.name))
        lines = [member.text(inner) for member in members]
        if self._others is not None:
            lines.append(f"{inner}[k: string]: {self._others.text(inner)}")
        return f"{{{_on_lines(NEXT.join(lines))}{indent}}}" if lines else "{}"


def _others(value: JsonValue) -> _Type | None:
    """What properties that are not named may be."""
    if value is None:
        return None
    if not isinstance(value, bool):
        raise _NoForm
    return _Plain("any" if value else "never")


class _Array:
    def __init__(self, schema: JSON, known: _Known) -> None:
        self._description, self._limits = _said(schema)
        items = schema.get("items")
        self._item: _Type = _read(items, known) if items else _Plain("any")

    def notes(self, indent: str) -> str:
        return _notes(self._description, self._limits, indent)

    def text(self, indent: str) -> str:
        inner = indent + INDENT
        if notes := self._item.notes(inner):
            return f"Array<\n{notes}{inner}{self._item.text(inner)}\n{indent}>"
        return f"Array<{self._item.text(indent)}>"


class _AnyOf:
    def __init__(self, schema: JSON, known: _Known) -> None:
        self._description = schema.get("description") or ""
        self._types = [_read(part, known) for part in schema["anyOf"]]

    def notes(self, indent: str) -> str:
        return _notes(self._description, "", indent)

    def text(self, indent: str) -> str:
        return " | ".join(kind.text(indent) for kind in self._types)


def _read(schema: JsonValue, known: _Known) -> _Type:
    if isinstance(schema, bool):
        return _Plain("any" if schema else "null")
    if not isinstance(schema, dict):
        raise _NoForm
    described = {"description": schema.get("description")}
    if "$ref" in schema:
        return _Plain(known.name(schema["$ref"]), described)
    if "anyOf" in schema:
        return _AnyOf(schema, known)
    if "enum" in schema:
        return _Plain(_enum(schema), described)
    if not schema:
        return _Plain("any")
    match schema["type"]:
        case "object":
            return _Object(schema, known)
        case "array":
            return _Array(schema, known)
        case "integer":
            return _Plain("number", schema)
        case str(name):
            return _Plain(name, schema)
        case list(names):
            return _Plain(" | ".join(NAMES[name] for name in names), described)
    raise _NoForm


def _enum(schema: JSON) -> str:
    values = schema["enum"]
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [name for name in kind if name != "null"] or ["null"]
        if not 1 <= len(kind) <= 2 or len(others) > 1:
            raise _NoForm
        kind = others[0]
    accepted = _KINDS.get(kind) if isinstance(kind, str) else None
    for value in values:
        if value is not None and accepted and not isinstance(value, accepted):
            raise _NoForm
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
