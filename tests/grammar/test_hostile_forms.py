"""Forms that are made to cost much: refused by the keyword that asks for it, or ended at a limit
while the answer grows. What is counted is work, not time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from trueline.errors import UsageError
from trueline.grammar.compiled import json_grammar, lark_grammar, parser_limits, regex_grammar
from trueline.grammar.constraint import Constraint
from trueline.grammar.guide import Guide
from trueline.grammar.json_schema import MAX_OPTIONAL, MAX_PROPERTIES
from trueline.grammar.structured import StructuredOutputsParams
from trueline.grammar.vocabulary import byte_vocabulary

END = 256


def record(count: int, required: int = 0, **more: Any) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": names[:required],
    } | more


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


HALF = MAX_PROPERTIES // 2


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (record(10_000), "json.properties: 10000 that are not required; accepted: up to 400 of"),
        (record(MAX_OPTIONAL + 1), "json.properties: 401 that"),
        (record(MAX_PROPERTIES + 1, MAX_PROPERTIES + 1), "json.properties: too many; accepted: up"),
        ({"prefixItems": [record(HALF, HALF), {"anyOf": [record(HALF + 1, HALF + 1)]}]},
         "json.prefixItems.1.anyOf.0.properties: too many; accepted: up to 2000 in all"),
        ({"type": "integer", "multipleOf": 99991}, "json.multipleOf: found 99991; accepted: "),
        ({"multipleOf": 0.0123457}, "json.multipleOf: found 0.0123457; accepted: "),
        (nested(65), "json.items.items"),
        ({"type": "array", "uniqueItems": True}, "json.uniqueItems: uniqueItems is not enforced"),
        ({"pattern": "^(?=a)b"}, "json.pattern: regex parse error"),
        ({"minItems": 2**20 + 1}, "json.minItems: found 1048577; accepted: "),
        ({"$ref": "#"}, "json.$ref: no text is possible"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
         "json.$defs.a.$ref: no text is possible"),
        ({"allOf": [{"anyOf": [{"properties": {"a": {"const": i}}} for i in range(20)]}] * 6},
         "json.allOf: schema too large"),
    ],
)  # fmt: skip
def test_what_would_take_long_is_refused(schema: Any, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        json_grammar(schema)
    assert str(refused.value).startswith(told), str(refused.value)


def limit_met(made: Constraint, said: bytes) -> tuple[int, Guide]:
    """After so many bytes."""
    assert made.grammar is not None
    limits = parser_limits(by_client=made.by_client)
    matcher = LLMatcher(byte_vocabulary(), made.grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    guide = Guide(made, {made.grammar: matcher}, [END])
    for i, byte in enumerate(said):
        own = guide._matcher
        assert own is not None
        own.compute_bitmask()
        guide.check(own)
        if guide.problem:
            return i, guide
        guide.accept(byte)
    return len(said), guide


@pytest.mark.parametrize("schema", [record(MAX_OPTIONAL), record(300, additionalProperties=False)])
def test_the_largest_objects_can_be_written(schema: Any) -> None:
    said = ('{"p0":null,"p7":null,"p' + str(len(schema["properties"]) - 1) + '":null}').encode()
    count, guide = limit_met(Constraint(grammar=json_grammar(schema)), said)
    assert (count, guide.problem) == (len(said), "")


@pytest.mark.parametrize("multiple", [9973, 0.01, 250_000, 1.5])
def test_multiples_that_are_few(multiple: float) -> None:
    count, guide = limit_met(
        Constraint(grammar=json_grammar({"type": "number", "multipleOf": multiple})), b"0"
    )
    assert (count, guide.problem) == (1, "")


@pytest.mark.parametrize(
    "grammar", ['start: s\ns: "a" | s s | s s s', 'start: s\ns: s s s s | "a"?']
)
def test_an_ambiguous_grammar_ends_before_it_costs_much(grammar: str) -> None:
    """Of a client; a token's work grows with the square of what came before."""
    made = StructuredOutputsParams(grammar=grammar).constraint()
    assert made.by_client
    count, guide = limit_met(made, b"a" * 400)
    assert 20 < count < 250
    assert guide.too_complex
    assert guide.problem == "structured_outputs: the grammar takes more work for a token than " \
                            "the limit"  # fmt: skip
    own = StructuredOutputsParams(json=record(MAX_OPTIONAL)).constraint()
    assert not own.by_client
    expressions = 'start: e\ne: t | e "a" t\nt: "(" e ")" | "a"'
    many, _ = limit_met(StructuredOutputsParams(grammar=expressions).constraint(), b"a" * 401)
    assert many == 401


def test_a_limit_of_the_lexer_is_the_grammars_fault() -> None:
    """Not a failure of ours."""
    made = Constraint(name="form", grammar=regex_grammar("((a{0,100}){0,100}){0,100}"))
    count, guide = limit_met(made, b"a" * 2000)
    assert count < 2000
    assert guide.too_complex
    assert guide.problem == "form: the grammar takes more work for a token than the limit"


def test_a_schema_within_a_clients_grammar_is_bounded() -> None:
    """Ours does not see it."""
    lark_grammar("start: a\na: %json " + json.dumps(record(200)))
    with pytest.raises(UsageError, match=r"^grammar: .*too big"):
        lark_grammar("start: a\na: %json " + json.dumps(record(6000)))
