"""JSON schemas, drawn: every keyword that we enforce by itself, with every other, and wherever a
schema may stand; then mixtures of them. The same seed draws the same schemas everywhere."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = Any
TEXTS = ("a", "", 'say "no"', "back\\slash", "é", "e\u0301", "😀", "\u2028", "line\nfeed", "/",
         "\U0010ffff", "\u202egnp", "null", " ", "\\u0061", "tab\t", "{}", "一")  # fmt: skip
NUMBERS = (0, 1, -1, 7, 0.5, -2.25, 1e3, 12345, 1e-3, 0.1)
VALUES = (*TEXTS, *NUMBERS, None, True, False, [], {}, [1, ["a"]], {"a": {"é": [None]}})
NAMES = ("a", "b", "é", "x1", "", 'q"', "\\", "line\n", "😀", "long name")
PATTERNS = ("^a+$", "^[a-c]{2,4}$", "b", "^(x|yz)*$", "^\\d{3}$", "^\\w+$", "^[^a]*$", "^é?$", "",
            "^\\s$", "^.$", "\\.$", "^a|b$", "^[\\x20-\\x7e]+$", "^\\W$", "^\\D\\S$")  # fmt: skip
NAME_PATTERNS = ("^x", "[0-9]$", "^é", "^[A-Z]+$", "^$")
FORMATS = "date date-time duration email hostname ipv4 ipv6 time uri uuid".split()
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")

OF_TYPE: dict[str, dict[str, tuple[Any, ...]]] = {
    "integer": {
        "minimum": (0, -3, 0.5, -1e3, 100),
        "maximum": (10, -1, 2.5, 1e6),
        "exclusiveMinimum": (0, -7.5, 3),
        "exclusiveMaximum": (5, 0.5, 200),
        "multipleOf": (1, 3, 7, 2.5, 0.5, 10),
    },
    "number": {
        "minimum": (0, -1.5, 0.001, 3),
        "maximum": (1, 2.25, -0.5, 1e5),
        "exclusiveMinimum": (0, 0.5, -10),
        "exclusiveMaximum": (0.75, 9, 1e3),
        "multipleOf": (0.1, 0.25, 3, 1.5, 1e-4),
    },
    "string": {
        "minLength": (0, 1, 3),
        "maxLength": (0, 2, 5, 12),
        "pattern": PATTERNS,
        "format": tuple(FORMATS),
    },
    "array": {
        "items": (True, {"type": "integer"}, {"enum": ["a", "b"]}, False),
        "prefixItems": ([{"type": "null"}], [{"type": "boolean"}, {"type": "string"}], [True]),
        "minItems": (0, 1, 3),
        "maxItems": (0, 1, 4),
    },
    "object": {
        "properties": (
            {"a": {"type": "integer"}},
            {"é": {"type": "null"}, 'q"': {"type": "boolean"}},
            {"a": False, "b": True},
            {"x1": {"type": "string"}, "line\n": {"const": "\n"}},
        ),
        "required": (["a"], ["a", "b"], ["é", "x1"], []),
        "additionalProperties": (False, True, {"type": "integer"}, {"maxLength": 2}),
        "patternProperties": (
            {"^x": {"type": "integer"}},
            {"^a$": {"minimum": 3}, "^b": {"type": "boolean"}},
        ),
        "minProperties": (0, 1, 2),
        "maxProperties": (0, 1, 3),
    },
}
"""By type, values of each keyword that is about it."""
FREE: dict[str, tuple[Any, ...]] = {
    "type": (*KINDS, ["string", "null"], ["integer", "array"], ["number", "object"], list(KINDS)),
    "enum": (list(TEXTS), list(NUMBERS), ["a", 1, None], [{"a": 1}, [1]], ["x"]),
    "const": VALUES,
    "anyOf": ([{"type": "integer"}, {"type": "string", "maxLength": 2}], [{"minimum": 3}, {}]),
    "oneOf": (
        [{"type": "integer"}, {"type": "string"}],
        [{"enum": ["a", "b"]}, {"const": "c"}],
        [{"type": "integer"}, {"type": "number"}],
    ),
    "allOf": ([{"type": "integer"}, {"minimum": 3}], [{"maxLength": 3}, {"pattern": "^a*$"}]),
}
"""Of any type."""


def _in_tree(inner: Schema) -> Schema:
    """A list that may hold itself."""
    node = {
        "type": "object",
        "properties": {"value": {"$ref": "#/$defs/value"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node, "value": inner}, "$ref": "#/$defs/node"}


PLACES: dict[str, Callable[[Schema], Schema]] = {
    "items": lambda s: {"type": "array", "items": s, "maxItems": 3},
    "prefixItems": lambda s: {"type": "array", "prefixItems": [s, s], "items": False},
    "properties": lambda s: {"type": "object", "properties": {"a": s, "b": True}},
    "required": lambda s: {
        "type": "object",
        "properties": {"a": s},
        "required": ["a"],
        "additionalProperties": False,
    },
    "additionalProperties": lambda s: {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": s,
    },
    "patternProperties": lambda s: {"type": "object", "patternProperties": {"^x": s}},
    "anyOf": lambda s: {"anyOf": [s, {"type": "null"}]},
    "oneOf": lambda s: {"oneOf": [{"type": "array", "prefixItems": [s]}, {"type": "string"}]},
    "allOf": lambda s: {"allOf": [s, {"type": list(KINDS)}]},
    "$defs": lambda s: {"$defs": {"a/b~c é": s}, "items": {"$ref": "#/$defs/a~1b~0c é"}},
    "definitions": lambda s: {"definitions": {"s": s}, "$ref": "#/definitions/s"},
    "$ref to itself": _in_tree,
    "$ref to the root": lambda s: {
        "type": "object",
        "properties": {"own": s, "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "additionalProperties": False,
    },
    "twice": lambda s: {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"anyOf": [s, {"type": "array"}]}}},
        "required": ["a"],
    },
}
"""Where a schema may stand in another."""


def singles() -> Iterator[Schema]:
    """Every value of every keyword, with its type and without."""
    for keyword, values in FREE.items():
        yield from ({keyword: value} for value in values)
    for kind, keywords in OF_TYPE.items():
        for keyword, values in keywords.items():
            for value in values:
                yield {"type": kind, keyword: value}
                yield {keyword: value}


def pairs(draw: random.Random) -> Iterator[Schema]:
    """Every two keywords that may meet, in both orders."""
    for kind, keywords in OF_TYPE.items():
        met = keywords | {name: FREE[name] for name in FREE if name != "type"}
        for one, other in itertools.permutations(met, 2):
            values = (draw.choice(met[one]), draw.choice(met[other]))
            yield {"type": kind, one: values[0], other: values[1]}
    for one, other in itertools.permutations(FREE, 2):
        yield {one: draw.choice(FREE[one]), other: draw.choice(FREE[other])}


def nested(draw: random.Random) -> Iterator[Schema]:
    """Every place with every keyword, and two places around each other."""
    inner = [*singles()]
    for schema in inner:
        yield PLACES[draw.choice([*PLACES])](schema)
    for place in PLACES.values():
        for kind, keywords in OF_TYPE.items():
            for keyword, values in keywords.items():
                yield place({"type": kind, keyword: draw.choice(values)})
    for outer, within in itertools.product(PLACES.values(), repeat=2):
        # a definition is found at the root alone
        made = within({"type": "integer", "minimum": 3})
        if not {"$defs", "definitions"} & made.keys() and "#" not in str(made):
            yield outer(made)


def mixture(draw: random.Random, depth: int = 3) -> Schema:
    """Some keywords of one type, or none, with schemas in their places."""
    if depth == 0 or draw.random() < 0.25:
        return draw.choice([{"type": draw.choice(KINDS)}, {"const": draw.choice(VALUES)}, True])
    if draw.random() < 0.3:
        return PLACES[draw.choice(["anyOf", "items", "properties", "required", "allOf"])](
            mixture(draw, depth - 1)
        )
    kind = draw.choice([*OF_TYPE])
    made: dict[str, Any] = {"type": kind} if draw.random() < 0.9 else {}
    for keyword, values in OF_TYPE[kind].items():
        if draw.random() < 0.35:
            made[keyword] = draw.choice(values)
    if "properties" in made:
        names = draw.sample(NAMES, draw.randint(1, 4))
        made["properties"] = {name: mixture(draw, depth - 1) for name in names}
        made["required"] = draw.sample(names, draw.randint(0, len(names)))
    if "items" in made and draw.random() < 0.5:
        made["items"] = mixture(draw, depth - 1)
    if draw.random() < 0.15:
        keyword = draw.choice([name for name in FREE if name not in made])
        made[keyword] = draw.choice(FREE[keyword])
    return made


def schemas(seed: int, num_mixtures: int) -> list[Schema]:
    """All different."""
    draw = random.Random(seed)
    found = {json.dumps(each): each for each in (*singles(), *pairs(draw), *nested(draw))}
    enough = len(found) + num_mixtures
    while len(found) < enough:
        made = mixture(draw)
        found[json.dumps(made)] = made
    return [*found.values()]


def keywords_of(schema: Schema) -> set[str]:
    """All that are said, wherever."""
    if isinstance(schema, list):
        return set().union(*map(keywords_of, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            found |= set().union(*map(keywords_of, value.values()))
        elif keyword not in ("const", "enum"):
            found |= keywords_of(value)
    return found
