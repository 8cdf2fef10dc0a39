"""Where llguidance lets through what a schema forbids, and what is asked of it instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from trueline.errors import short_repr
from trueline.grammar.json_schema import SchemaError, all_parts
from trueline.utils.json_types import JSON, JsonValue

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"^(?:[0-9]{{4}}-(?:(?:0[13-9]|1[0-2])-..|02-(?:[01].|2[0-8]))|{_LEAP_YEAR}-02-29)"
FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "date-time": f"{_DATE}.{{7}}[0-5]",
    "hostname": "^.{1,253}$",
    "time": "^.{6}[0-5]",
}
"""What a format asks for beside llguidance's own expression: days that were, a name's length, and
no leap second, of which few days have one."""
BESIDE = 1e-9
"""How far from a whole number that is excluded the next number is."""
NO_CODES = 'nrbtf\\"'
"""Escapes of one letter alone, which have one spelling."""
_ONLY_AS_CODE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_DEFINING = {"$defs", "definitions", "type"}


def strict(schema: JSON) -> tuple[JSON, str | None]:
    """The schema, changed, and the escapes that texts may have (None: all). SchemaError where it
    asks for a character that cannot be said without the others."""
    everything = [*all_parts(schema, ())]
    letters = _escapes(everything)
    met = any(_meets_another(part) for _, part in everything)
    for _, part in everything:
        _move_bounds(part, met)
        if beside := FORMATS.get(part.get("format", "")):
            part["allOf"] = [*part.get("allOf", ()), {"pattern": beside}]
    return schema, letters


# -- whole numbers that are excluded -------------------------------------------------------


def _meets_another(schema: JSON) -> bool:
    """A value has to pass two schemas, whose bounds llguidance puts together."""
    applied = [name for name in ("anyOf", "oneOf", "$ref") if name in schema]
    return "allOf" in schema or bool(applied and schema.keys() - _DEFINING - {applied[0]})


def _move_bounds(schema: JSON, met: bool) -> None:
    """A whole number that is excluded comes through where the other bound is less than 1 away."""
    low = max(schema.get(name, -math.inf) for name in ("minimum", "exclusiveMinimum"))
    high = min(schema.get(name, math.inf) for name in ("maximum", "exclusiveMaximum"))
    if schema.get("type") == "integer" or (high - low >= 1 and not met):
        return
    for keyword, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(keyword)
        if bound is not None and bound == int(bound):
            schema[keyword] = bound + sign * max(BESIDE, math.ulp(bound))


# -- names of properties -------------------------------------------------------------------


def _escapes(everything: list[tuple[tuple[str, ...], JSON]]) -> str | None:
    """`"\\u0061"` is taken for another name than `"a"`, where an object has names of its own and
    may have others."""
    if not any(_may_hide_names(part) for _, part in everything):
        return None
    for path, part in everything:
        for keyword in ("const", "enum"):
            for text in _texts(part.get(keyword)):
                if _ONLY_AS_CODE.search(text):
                    raise SchemaError(
                        (*path, keyword),
                        f"found {short_repr(text)}; accepted: no control characters but \\b, \\t, "
                        "\\n, \\f and \\r, or additionalProperties false in every object that has "
                        "properties",
                    )
    return NO_CODES


def _may_hide_names(schema: JSON) -> bool:
    named = schema.get("properties") or schema.get("required")
    by_pattern = schema.get("patternProperties")
    others = schema.get("additionalProperties") is not False
    return bool(((named or by_pattern) and others) or (named and by_pattern))


def _texts(value: JsonValue) -> Iterator[str]:
    """Of a value; names of properties are always spelled in one way."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
