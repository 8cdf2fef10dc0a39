"""A function's schema, checked: what every one of its calls obeys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

from trueline.grammar.json_schema import SchemaError, enforced
from trueline.grammar.json_strict import strict
from trueline.utils.json_types import JSON, JsonValue

DEFINITIONS = ("$defs", "definitions")


def arguments_schema(parameters: JSON) -> JSON:
    """Of the object that all arguments are."""
    kept = enforced(parameters)
    assert isinstance(kept, dict), "parameters are an object"
    if kept.get("type", "object") != "object":
        raise SchemaError(("type",), f"found {kept['type']!r}; accepted: object")
    strict(deepcopy(kept))  # parts are asked again, which do not know where they are
    return {"type": "object"} | kept


def definitions(schema: JSON) -> JSON:
    return {name: schema[name] for name in DEFINITIONS if name in schema}


def refers_elsewhere(schema: JsonValue) -> bool:
    """Whether a part refers to what is not in the definitions: by itself it means nothing."""
    return any(
        not any(found.startswith(f"#/{name}/") for name in DEFINITIONS)
        for found in _references(schema)
    )


def _references(schema: JsonValue) -> Iterator[str]:
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield reference
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def resolved(schema: JsonValue, root: JSON, path: tuple[str, ...]) -> JsonValue:
    """Without a reference at its top."""
    seen = 0
    while isinstance(schema, dict) and "$ref" in schema:
        seen += 1
        if seen > len(DEFINITIONS) * 64 or len(schema) > 1:
            raise SchemaError((*path, "$ref"), "accepted: by itself, and not in a circle")
        _, where, *parts = schema["$ref"].split("/")
        found = root.get(where, {})
        for part in parts:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise SchemaError((*path, "$ref"), f"there is no {schema['$ref']}")
            found = found[key]
        schema = found
    return schema
