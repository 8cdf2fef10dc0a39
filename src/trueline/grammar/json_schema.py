"""Which JSON schemas are honoured. A keyword is enforced, or it says nothing about what is valid
(an annotation), or the schema is refused by its name and place: nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Final
from urllib.parse import quote

from trueline.errors import TruelineError, short, short_repr
from trueline.utils.json_types import JSON, JsonValue

MAX_DEPTH = 64
"""Of nested lists and objects."""
MAX_COUNT = 1 << 20
"""Of minItems, maxLength and the like."""
MAX_PROPERTIES, MAX_OPTIONAL = 2_000, 400
"""Named ones of all objects together, and of one object those that may be left out: compiling takes
time with the square of the one, a token's mask has a row of llguidance's parser for the other."""
MAX_MULTIPLE = 10_000
"""Of multipleOf, without the point and the zeros at its end: as many states has what checks it."""
MAX_NUMBER = 2**53 - 1
"""llguidance computes with doubles, which tell whole numbers apart up to here."""

ANNOTATIONS: Final = frozenset(
    "$anchor $comment $schema contentEncoding contentMediaType contentSchema default deprecated "
    "description discriminator example examples readOnly title writeOnly".split()
)
FORMATS: Final = frozenset("date date-time duration email hostname ipv4 ipv6 time uri uuid".split())
TYPES: Final = frozenset("array boolean integer null number object string".split())
_COUNTS = "maxItems maxLength maxProperties minItems minLength minProperties"
_BOUNDS = "exclusiveMaximum exclusiveMinimum maximum minimum"
_NOTHING: Mapping[str, JsonValue] = {
    "additionalItems": True,
    "dependentRequired": {},
    "dependentSchemas": {},
    "minContains": 0,
    "patternProperties": {},
    "propertyNames": True,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}
"""Values that ask for nothing."""
_OF_URIS = "#%/?:@!$&'()*+,;=~"
"""Beside letters, digits and -._, what a reference has as it is."""
_INSTEAD = {
    "additionalItems": "prefixItems, and items for the rest",
    "nullable": 'type as ["string", "null"]',
    "not": "a schema that says what is wanted",
    "id": "$ref to places in the schema itself, as #/$defs/name",
    "$id": "$ref to places in the schema itself, as #/$defs/name",
}


class SchemaError(TruelineError):
    """`path` leads to the keyword, from the schema's root."""

    def __init__(self, path: tuple[str, ...], problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{dotted(path)}: {problem}")


def dotted(path: tuple[str, ...]) -> str:
    return short(".".join(path), 200)


def enforced(schema: JsonValue) -> JsonValue:
    """The schema without what says nothing. SchemaError names the first keyword that is not
    honoured."""
    kept = _schema(schema, (), depth=0)
    left = MAX_PROPERTIES
    for path, part in all_parts(kept, ()) if isinstance(kept, dict) else ():
        left -= len(part.get("properties", ()))
        if left < 0:
            accepted = f"up to {MAX_PROPERTIES} in all objects together"
            raise SchemaError((*path, "properties"), f"too many; accepted: {accepted}")
    return kept


def _schema(schema: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if depth > MAX_DEPTH:
        raise SchemaError(path, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError(path, f"found {short_repr(schema)}; accepted: an object, true or false")
    kept: JSON = {}
    for keyword, value in schema.items():
        at = (*path, keyword)
        if keyword in _NOTHING and value == _NOTHING[keyword]:
            continue
        if keyword in ANNOTATIONS or (keyword == "$id" and not path):
            continue
        if keyword.startswith("x-") and keyword != "x-guidance":
            continue
        read = _KEYWORDS.get(keyword)
        if read is None:
            instead = _INSTEAD.get(keyword)
            raise SchemaError(
                at,
                f"{short(keyword)} is not enforced; accepted: {instead or ', '.join(ENFORCED)}",
            )
        kept[keyword] = read(value, at, depth + 1)
    _check_properties(kept, path)
    return kept


def parts(schema: JSON) -> Iterator[tuple[tuple[str, ...], JSON]]:
    """The schemas directly within, each with the way to it."""
    found: list[tuple[tuple[str, ...], JsonValue]]
    for keyword, value in schema.items():
        if keyword in ("$defs", "definitions", "properties", "patternProperties"):
            found = [((keyword, name), part) for name, part in value.items()]
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            found = [((keyword, str(i)), part) for i, part in enumerate(value)]
        elif keyword in ("items", "additionalProperties"):
            found = [((keyword,), value)]
        else:
            continue
        yield from ((at, part) for at, part in found if isinstance(part, dict))


def all_parts(schema: JSON, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], JSON]]:
    """The schema and those within, to any depth."""
    yield path, schema
    for at, part in parts(schema):
        yield from all_parts(part, (*path, *at))


def _check_properties(schema: JSON, path: tuple[str, ...]) -> None:
    """JSON may say a property twice, which counts once: only required ones are sure to differ."""
    least = schema.pop("minProperties", 0)
    if least > len(set(schema.get("required", ()))):
        raise SchemaError(
            (*path, "minProperties"),
            f"found {least}; accepted: as many as are required, or fewer",
        )
    optional = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
    if optional > MAX_OPTIONAL:
        raise SchemaError(
            (*path, "properties"),
            f"{optional} that are not required; accepted: up to {MAX_OPTIONAL} of one object",
        )


def _schemas(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    """By name."""
    if not isinstance(value, dict):
        raise SchemaError(path, f"found {short_repr(value)}; accepted: an object of schemas")
    return {name: _schema(each, (*path, name), depth + 1) for name, each in value.items()}


def _list(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, list) or not value:
        raise SchemaError(path, f"found {short_repr(value)}; accepted: a list of schemas")
    return [_schema(each, (*path, str(i)), depth + 1) for i, each in enumerate(value)]


def _type(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    names = value if isinstance(value, list) and value else [value]
    if not all(isinstance(name, str) and name in TYPES for name in names):
        accepted = f"{', '.join(sorted(TYPES))}, or a list of them"
        raise SchemaError(path, f"found {short_repr(value)}; accepted: {accepted}")
    return value


def _count(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(number) is not int or not 0 <= number <= MAX_COUNT:
        accepted = f"a whole number from 0 to {MAX_COUNT}"
        raise SchemaError(path, f"found {short_repr(value)}; accepted: {accepted}")
    return number


def _number(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if type(value) not in (int, float):
        raise SchemaError(path, f"found {short_repr(value)}; accepted: a number")
    return _exact(value, path)


def _exact(value: JsonValue, path: tuple[str, ...]) -> JsonValue:
    if not abs(value) <= MAX_NUMBER:  # NaN neither
        accepted = f"numbers from -{MAX_NUMBER} to {MAX_NUMBER}, which are exact"
        raise SchemaError(path, f"found {short_repr(value)}; accepted: {accepted}")
    return value


def _multiple(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise SchemaError(path, f"found {short_repr(value)}; accepted: a number above 0")
    digits = "".join(map(str, Decimal(repr(value)).as_tuple().digits)).rstrip("0")
    if int(digits or 0) > MAX_MULTIPLE:
        accepted = f"numbers whose digits, without the zeros at the end, are up to {MAX_MULTIPLE}"
        raise SchemaError(path, f"found {short_repr(value)}; accepted: {accepted}")
    return value


def _text(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, str):
        raise SchemaError(path, f"found {short_repr(value)}; accepted: a text")
    return value


def _format(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, str) or value not in FORMATS:
        accepted = f"{', '.join(sorted(FORMATS))}; or pattern"
        raise SchemaError(path, f"format {short_repr(value)} is not enforced; accepted: {accepted}")
    return value


def _names(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError(path, f"found {short_repr(value)}; accepted: a list of names")
    return value


def _values(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, list) or not value:
        raise SchemaError(path, f"found {short_repr(value)}; accepted: a list of values, not empty")
    return [_value(each, path, depth) for each in value]


def _value(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if depth > MAX_DEPTH:
        raise SchemaError(path, f"nested deeper than {MAX_DEPTH} levels")
    for part in value.values() if isinstance(value, dict) else value if type(value) is list else ():
        _value(part, path, depth + 1)
    return _exact(value, path) if type(value) in (int, float) else value


def _items(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if isinstance(value, list):
        raise SchemaError(path, "found a list, as of draft 7; accepted: prefixItems")
    return _schema(value, path, depth)


def _ref(value: JsonValue, path: tuple[str, ...], depth: int) -> JsonValue:
    if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
        accepted = "a place in the schema itself, as #/$defs/name"
        raise SchemaError(path, f"$ref {short_repr(value)}; accepted: {accepted}")
    return quote(value, safe=_OF_URIS, errors="surrogatepass")


Reader = Callable[[JsonValue, tuple[str, ...], int], JsonValue]
_KEYWORDS: dict[str, Reader] = {
    "$defs": _schemas,
    "$ref": _ref,
    "additionalProperties": _schema,
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _list),
    "const": _value,
    "definitions": _schemas,
    "enum": _values,
    "format": _format,
    "items": _items,
    "multipleOf": _multiple,
    "pattern": _text,
    "patternProperties": _schemas,
    "properties": _schemas,
    "required": _names,
    "type": _type,
    **dict.fromkeys(_COUNTS.split(), _count),
    **dict.fromkeys(_BOUNDS.split(), _number),
}
ENFORCED: Final = tuple(sorted(_KEYWORDS))
"""Keywords that every output of a schema obeys."""
