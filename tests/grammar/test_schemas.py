"""Whatever a schema says, no output breaks it: schemas from our own generator, outputs drawn at
random through the guide, `jsonschema` as the judge."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from grammars import accepts
from schema_draws import SCHEMAS, draws, problem, sample
from schemas import Schema, keywords_of
from trueline.errors import UsageError
from trueline.grammar.compiled import json_grammar
from trueline.grammar.json_schema import _NOTHING, ANNOTATIONS, ENFORCED, FORMATS

WITHOUT_EFFECT = {"$defs", "definitions", "minProperties"}
"""Of their own: minProperties is refused where it asks for more than required does."""


def _named(error: UsageError, schema: Schema) -> str:
    """The keyword that it names; empty where that is not in the schema."""
    left, here, keyword = str(error).removeprefix("json"), schema, ""
    while left.startswith("."):
        names = [*here] if isinstance(here, dict) else [str(i) for i in range(len(here))]
        found = [name for name in names if left[1:].startswith(name)]
        if not found:
            return ""
        keyword = max(found, key=len)
        left = left[1 + len(keyword) :]
        here = here[keyword] if isinstance(here, dict) else here[int(keyword)]
        if not isinstance(here, dict | list):
            break
    return keyword if left.startswith(":") else ""


def _check(schemas: list[Schema], num_draws: int, least: float) -> None:
    draw, num_accepted = random.Random(5), 0
    for schema in schemas:
        try:
            grammar = json_grammar(schema)
        except UsageError as error:
            assert _named(error, schema) in ENFORCED, (schema, error)
            continue
        num_accepted += 1
        for text in draws(grammar, draw, num_draws):
            assert problem(schema, text) == "", (schema, text)
    assert num_accepted > least * len(schemas)


def test_every_output_is_valid_and_every_refusal_names_a_keyword() -> None:
    _check(sample(150), num_draws=2, least=0.6)


def test_all_that_is_enforced_is_drawn() -> None:
    assert len(SCHEMAS) > 3000
    assert set().union(*map(keywords_of, SCHEMAS)) == set(ENFORCED)


@pytest.mark.slow
def test_every_output_of_every_schema() -> None:
    _check(SCHEMAS, num_draws=6, least=0.75)


def _weaker(schema: Schema) -> list[tuple[str, Schema]]:
    """Without one of its keywords each."""
    return [
        (keyword, {name: value for name, value in schema.items() if name != keyword})
        for keyword in (schema if isinstance(schema, dict) else ())
        if keyword not in WITHOUT_EFFECT
    ]


def _proven(schemas: list[Schema], num_draws: int) -> set[str]:
    """Keywords for which an output was found that only they forbid, and that is not accepted."""
    draw, proven = random.Random(6), set[str]()
    for schema in schemas:
        try:
            grammar = json_grammar(schema)
        except UsageError:
            continue
        for keyword, weaker in _weaker(schema):
            try:
                found = [*draws(json_grammar(weaker), draw, num_draws)]
            except UsageError:  # as of a reference to what is gone
                continue
            for text in found:
                if problem(schema, text):
                    assert not accepts(grammar, text), (schema, text)
                    proven.add(keyword)
    return proven


def test_what_a_keyword_alone_forbids_is_not_accepted() -> None:
    _proven(sample(60), num_draws=2)


@pytest.mark.slow
def test_every_keyword_is_seen_to_forbid_something() -> None:
    assert _proven(SCHEMAS, num_draws=3) == set(ENFORCED) - WITHOUT_EFFECT


# -- keywords one by one -----------------------------------------------------------------

CASES: list[tuple[Schema, list[str], list[str]]] = [
    ({"minimum": 3}, ["3", "null"], ["2", "2.999999"]),
    ({"type": "number", "maximum": 0.1}, ["0.1", "-5"], ["0.11", "0.10000000000000000001"]),
    ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01"], ["0", "0.0", "-0", "0.51"]),
    ({"minimum": 98.5, "exclusiveMaximum": 99}, ["98.6"], ["99", "99.0", "98.4"]),
    ({"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}, ["-0.1"], ["0", "-0", "-0.0"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, ["1"], ["0", "2"]),
    ({"type": "number", "multipleOf": 0.25}, ["0.25", "-1.75"], ["0.3", "1.1"]),
    ({"type": "integer", "multipleOf": 2.5}, ["5", "0"], ["2", "3"]),
    ({"enum": [2**53 - 1]}, ["9007199254740991"], ["9007199254740990", "9007199254740992"]),
    ({"type": "string", "maxLength": 2}, ['"é"', '"😀😀"'], ['"abc"']),
    ({"type": "string", "minLength": 2}, ['"😀😀"'], ['"😀"', '"\\n"']),
    ({"pattern": "^a+$"}, ['"aa"', "1"], ['"aa\\n"', '"ba"', '""']),
    ({"properties": {"a": {"type": "null"}}}, ['{"a":null,"b":1}'],
     ['{"\\u0061":1}', '{"b":1,"a":1}', '{"a":null,"\\u0061":1}']),
    ({"properties": {"é\n": {"type": "null"}}}, ['{"é\\n":null}'],
     ['{"\\u00e9\\n":1}', '{"é\\u000a":1}', '{"\\u00E9\\u000A":1}']),
    ({"patternProperties": {"^x": {"type": "null"}}}, ['{"x":null,"y":1}'],
     ['{"xy":1}', '{"\\u0078":1}']),
    ({"required": ["a"], "type": "object"}, ['{"a":1}'], ["{}", '{"\\u0061":1}']),
    ({"const": "\x01\x7f"}, ['"\\u0001\\u007f"'], ['"\x01\x7f"', '"\\u0001"']),
    ({"$ref": "#/$defs/Größe%20[x]", "$defs": {"Größe [x]": {"const": 1}}}, ["1"], ["2"]),
    ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
     ['"2023-02-29"', '"1900-02-29"', '"2023-02-30"', '"2023-04-31"', '"2023-13-01"']),
    ({"format": "date-time"}, ['"2024-02-29T12:00:00Z"', '"1999-12-31T23:59:59.5+01:00"'],
     ['"2023-02-29T12:00:00Z"', '"2024-02-29T12:00:60Z"', '"2024-02-29T24:00:00Z"']),
    ({"format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"', '"24:00:00Z"', '"23:59:59"']),
    ({"format": "hostname"}, ['"a-b.c"'], ['"-a"', '"a..b"', f'"{"a." * 127}a"', '""']),
    ({"format": "uuid"}, ['"12345678-9abc-def0-1234-56789abcdef0"'], ['"12345678"']),
    ({"format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"', '"1.2.3"', '"01.2.3.4"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[str(c[0])[:40] for c in CASES])
def test_what_is_accepted(schema: Schema, good: list[str], bad: list[str]) -> None:
    grammar = json_grammar(schema)
    for text in good:
        assert problem(schema, text) == "", "the case is wrong"
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"minimum": 2**53}, "json.minimum: found 9007199254740992; accepted: numbers from -9007"),
        ({"items": {"const": [1e300]}}, "json.items.const: found 1e+300; accepted: numbers"),
        ({"enum": [float("nan")]}, "json.enum: found nan; accepted: numbers"),
        ({"properties": {"a": {"const": "\x01"}}}, "json.properties.a.const: found '\\x01'; accep"),
        ({"const": object()}, "json: not JSON"),
        ({"const": "\ud800"}, "json: not JSON"),
        (False, "json: found false; accepted: a schema that accepts something"),
        ({"type": "number", "multipleOf": 123456789.5}, "json.multipleOf: "),
    ],
)
def test_what_cannot_be_enforced(schema: Schema, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        json_grammar(schema)
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("pattern", "good"),
    [
        (" ?", True),
        ("[ \\n]{0,2}", True),
        ("\\t|", True),
        ("x?", False),
        ("\\s*", False),
        ("(", False),
    ],
)
def test_white_space_is_white(pattern: str, good: bool) -> None:
    if good:
        assert accepts(json_grammar(True, whitespace_pattern=pattern), "[1,2]")
    else:
        with pytest.raises(UsageError, match=r"^structured_outputs\.whitespace_pattern = "):
            json_grammar(True, whitespace_pattern=pattern)


def _published() -> dict[str, set[str]]:
    """Every keyword of every draft, by the values that its metaschemas let it have."""
    found: dict[str, set[str]] = {}
    for uri in REGISTRY:
        document = REGISTRY.contents(uri)
        for keyword in document.get("properties", {}) if isinstance(document, dict) else ():
            found.setdefault(keyword, set()).add(uri)
    return found


SAYS: dict[str, Any] = {
    "propertyNames": {"maxLength": 1}, "dependencies": {"a": ["b"]}, "if": {"type": "null"},
    "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {"required": ["b"]}},
    "uniqueItems": True, "contains": {"type": "null"}, "minContains": 2, "divisibleBy": 3,
    "disallow": "string", "extends": {"type": "null"}, "unevaluatedItems": False,
    "unevaluatedProperties": False, "additionalItems": False, "not": {"type": "null"},
}  # fmt: skip
"""Something that some value would break, of keywords that are not enforced."""


@pytest.mark.parametrize("keyword", sorted(_published()))
def test_no_published_keyword_is_ignored(keyword: str) -> None:
    """It is enforced, it says nothing of what is valid, or it is refused by its name, be it unknown
    to this draft."""
    if keyword in ANNOTATIONS or keyword in ENFORCED:
        return
    value = SAYS.get(keyword, {"type": "null"})
    assert _NOTHING.get(keyword, 0) != value
    for schema, told in (
        ({keyword: value}, f"json.{keyword}: "),
        ({"anyOf": [{"items": {keyword: value}}]}, f"json.anyOf.0.items.{keyword}: "),
    ):
        if keyword == "$id" and told == "json.$id: ":
            continue  # the root's own name
        with pytest.raises(UsageError) as refused:
            json_grammar(schema)
        assert str(refused.value).startswith(told)


def test_annotations_say_nothing_of_what_is_valid() -> None:
    """So the judge says."""
    for keyword in sorted(ANNOTATIONS - {"$anchor", "$schema"}):
        for text in ("1", '"x"', "{}", "[]"):
            assert problem({keyword: "x"}, text) == "", keyword


def test_formats_that_are_not_enforced_are_refused() -> None:
    known = {*jsonschema.FormatChecker().checkers, "uri-reference", "iri", "json-pointer", "regex"}
    for name in sorted(known - FORMATS):
        with pytest.raises(UsageError, match=rf"^json.format: format '{name}' is not enforced"):
            json_grammar({"format": name})
