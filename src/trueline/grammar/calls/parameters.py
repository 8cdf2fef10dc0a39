"""Arguments that are written a parameter at a time, texts as they are: DSML, and GLM's pairs.

All properties are written in the schema's order, those that are not required or not. Others are
not, as a grammar cannot see that none is there twice."""

from __future__ import annotations

import re
from collections.abc import Callable

from trueline.grammar.calls.raw_text import raw_text
from trueline.grammar.calls.rules import ANY, Rules
from trueline.grammar.calls.schemas import definitions, refers_elsewhere, resolved
from trueline.grammar.json_schema import SchemaError
from trueline.text.formats.values import TEXT, json_type, types_of
from trueline.utils.json_types import JSON, JsonValue

_PLAIN_NAME = re.compile(r"[^\s<>\"|｜](?:[^<>\"|｜\n]*[^\s<>\"|｜])?")
_OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
Parameter = Callable[[str, JsonValue, JSON, tuple[str, ...]], str]
"""Of a name, its schema, the root and the way to it."""


def each_parameter(schema: JSON, parameter: Parameter) -> str:
    """SchemaError where the schema says more than which parameters there are, or one of them is
    refused."""
    for keyword in schema:
        if keyword not in _OF_OBJECTS:
            raise SchemaError((keyword,), "not enforced of arguments in this model's calls; "
                                          "accepted: properties")  # fmt: skip
    if refers_elsewhere(schema):
        raise SchemaError(("$ref",), "accepted: to $defs or definitions")
    properties = dict(schema.get("properties", {}))
    required = schema.get("required", [])
    properties |= {name: {} for name in required if name not in properties}
    if not properties and schema.get("additionalProperties", False) is not False:
        raise SchemaError(("additionalProperties",), "not enforced of arguments in this model's "
                                                     "calls; accepted: properties")  # fmt: skip
    found = []
    for name, part in properties.items():
        path = ("properties", name)
        if not _PLAIN_NAME.fullmatch(name) or len(name) > 64:
            raise SchemaError(path, "accepted: a name of up to 64 letters, without marks")
        if part is False and name not in required:
            continue
        made = parameter(name, part, schema, path)
        found.append(made if name in required else f"({made})?")
    return " ".join(found)


def json_value(rules: Rules, schema: JsonValue, root: JSON) -> str:
    own = {} if schema is True else schema
    return rules.json(definitions(root) | own)


def plain_value(rules: Rules, schema: JsonValue, root: JSON, path: tuple[str, ...],
                close: str, others: tuple[str, ...]) -> str:  # fmt: skip
    """A value whose type is known by its schema alone, and the mark that closes it: a text as it
    is, other types as JSON."""
    types = types_of(schema, root)
    schema = resolved(schema, root, path)
    if schema is False:
        raise SchemaError(path, "found false; accepted: a schema that accepts something")
    if schema in (True, {}):
        return rules.until(f"/{ANY}/", close, others)
    if types is None:
        raise SchemaError((*path, *list(schema)[:1]), "accepted: beside a type")
    if "string" not in types:
        return f"{json_value(rules, schema, root)} {rules.written(close)}"
    found = []
    for part, at in _alternatives(schema, root, path):
        kinds = types_of(part, root)
        if kinds == TEXT:
            text = raw_text(part, at, types - TEXT)
            found.append(rules.until(text, close, others))
        elif kinds is not None and "string" not in kinds:
            found.append(f"{json_value(rules, part, root)} {rules.written(close)}")
        else:
            raise SchemaError(at, "accepted: alternatives that are texts, or are not")
    return f"({' | '.join(found)})"


def _alternatives(
    schema: JSON, root: JSON, path: tuple[str, ...]
) -> list[tuple[JSON, tuple[str, ...]]]:
    """Its texts apart from what else it may be."""
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            if len(schema) > 1:
                raise SchemaError((*path, keyword), "accepted: by itself")
            parts = [(resolved(part, root, path), (*path, keyword, str(i)))
                     for i, part in enumerate(schema[keyword])]  # fmt: skip
            texts = [part for part, _ in parts if types_of(part, root) == TEXT]
            if keyword == "oneOf" and len(texts) > 1:
                raise SchemaError((*path, keyword), "accepted: anyOf, where several are texts")
            return [
                found
                for part, at in parts
                for found in (_alternatives(part, root, at) if isinstance(part, dict) else ())
            ]
    if isinstance(schema.get("type"), list):
        return [({**_for(schema, kind), "type": kind}, path) for kind in schema["type"]]
    if "enum" in schema and len({json_type(each) for each in schema["enum"]}) > 1:
        texts = [each for each in schema["enum"] if isinstance(each, str)]
        others = [each for each in schema["enum"] if not isinstance(each, str)]
        split = [{**schema, "enum": each} for each in (texts, others) if each]
        return [(each, path) for each in split]
    return [(schema, path)]


_OF_TEXTS = ("maxLength", "minLength", "pattern", "format")


def _for(schema: JSON, kind: str) -> JSON:
    """What the schema says of values of this type."""
    if kind != "string":
        return {key: value for key, value in schema.items() if key not in _OF_TEXTS}
    of_text = (*_OF_TEXTS, "const", "enum", "type")
    return {key: value for key, value in schema.items() if key in of_text}
