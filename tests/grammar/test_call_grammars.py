"""Grammars of calls against the parsers that read them: what the one allows, the other takes, with
arguments that the function's schema accepts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from chat_answers import Call, calls_of, chat_format, write_calls
from chat_tokenizers import FIRST as FIRST_MARK
from chat_tokenizers import VOCAB, chat_tokenizer
from trueline.errors import UsageError
from trueline.grammar.calls.forms import CallableFunction, CallsForm, constraint_of
from trueline.grammar.compiled import parser_limits
from trueline.grammar.constraint import Constraint, Reasoning
from trueline.grammar.guide import AllBut, ByGrammar, Guide
from trueline.grammar.vocabulary import grammar_vocabulary
from trueline.text.formats.choose import CALLS
from trueline.text.formats.events import Event, Malformed, joined
from trueline.text.formats.markers import Markers
from trueline.text.formats.parser import ChatParser
from trueline.text.formats.values import Functions
from trueline.utils.json_types import JSON

SYNTAXES = sorted(CALLS)
THING = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
         "additionalProperties": False}  # fmt: skip
SCHEMA: JSON = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["one", "two </b>"]},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "number": {"type": "integer", "minimum": -3, "maximum": 12},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "thing": {"$ref": "#/$defs/thing"},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "either": {"type": ["boolean", "string"], "maxLength": 6},
        "mixed": {"enum": ["a", 1, None]},
    },
    "required": ["text", "number"],
    "additionalProperties": False,
    "$defs": {"thing": THING},
}
NOTHING: JSON = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": SCHEMA, "now": NOTHING}
FIRST, MARKS = 256, 8


class _Vocabulary:
    """Every byte, the format's marks, and an end."""

    bos_token_id = None

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.tokens = [bytes([each]) for each in range(FIRST)]
        self.tokens += [mark.encode() for mark in marks]
        self.tokens += [b"<unused>"] * (MARKS - len(marks)) + [b"<end>"]
        self.special_token_ids = list(range(FIRST, len(self.tokens)))
        self.eos_token_id = self.special_token_ids[-1]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def vocabulary(syntax: str) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(chat_format(syntax).spellings)))


def tokens_of(syntax: str) -> dict[str, int]:
    return {mark: FIRST + i for i, mark in enumerate(chat_format(syntax).spellings)}


def call_tokens(syntax: str) -> dict[str, int]:
    return {mark: token for mark, token in tokens_of(syntax).items() if "think" not in mark}


def form(syntax: str, **more: Any) -> CallsForm:
    functions = tuple(
        CallableFunction(name, schema, f"tools.{name}")
        for name, schema in more.pop("schemas", SCHEMAS).items()
    )
    asked = {"tokens": call_tokens(syntax), "required": True, "parallel": True} | more
    return CallsForm(syntax=syntax, functions=functions, **asked)


def matcher(syntax: str, grammar: str) -> LLMatcher:
    made = LLMatcher(vocabulary(syntax), grammar, log_level=0, limits=parser_limits())
    assert not made.is_error(), made.get_error()
    return made


def required(syntax: str, **more: Any) -> LLMatcher:
    grammar = constraint_of(form(syntax, **more)).grammar
    assert grammar is not None
    return matcher(syntax, grammar)


def drawn(made: LLMatcher, rng: random.Random, most: int = 600) -> list[int] | None:
    """Tokens that a model without a mind draws; None where it does not come to an end. Marks are
    what ends something, so they are drawn more often."""
    ids: list[int] = []
    while len(ids) < most and not made.is_stopped():
        if made.is_accepting() and rng.random() < 0.2:
            return ids
        mask = made.compute_bitmask()
        allowed = [i for i in range(FIRST + MARKS) if mask[i // 8] >> i % 8 & 1]
        marks = [i for i in allowed if i >= FIRST]
        if not allowed:  # but an end
            return ids
        printable = [i for i in allowed if 32 <= i < 127] or allowed
        pick = rng.choice(marks if marks and rng.random() < 0.5 else printable)
        if rng.random() < 0.05:
            pick = rng.choice(allowed)
        assert made.consume_token(pick)
        ids.append(pick)
    return ids if made.is_accepting() else None


def seen(syntax: str, ids: list[int], tokens: dict[str, int]) -> str:
    """As a parser sees these tokens."""
    markers = Markers(chat_format(syntax).spellings, tokens)
    found, held = "", b""
    for token in ids:
        if token in markers.by_token:
            found, held = found + held.decode("utf-8", "replace") + markers.by_token[token], b""
        else:
            held += bytes([token])
    return found + held.decode("utf-8", "replace")


def read(syntax: str, ids: list[int], tokens: dict[str, int], schemas: Any) -> list[Event]:
    markers = Markers(chat_format(syntax).spellings, tokens)
    parser = ChatParser(chat_format(syntax), markers, Functions(schemas), thinking=False)
    return joined([*parser.push(seen(syntax, ids, tokens)), *parser.finish()])


def check(syntax: str, ids: list[int], tokens: dict[str, int], schemas: Any = SCHEMAS) -> int:
    """How many calls there are, all in order."""
    events = read(syntax, ids, tokens, schemas)
    assert not any(isinstance(event, Malformed) for event in events), events
    calls = list(calls_of(events))
    for call in calls:
        jsonschema.validate(call.arguments, schemas[call.name])
    return len(calls)


def written(syntax: str, calls: list[Call]) -> list[int]:
    """Tokens of calls as the format's template writes them."""
    tokens, found = call_tokens(syntax), []
    text = write_calls(syntax, calls)
    markers = Markers(tuple(tokens), tokens)
    chars = {char: token for token, char in markers.by_token.items()}
    for char in markers.seen(text):
        found += [chars[char]] if char in chars else list(char.encode())
    return found


HI = {"text": "<b>é", "kind": "two </b>", "number": 12, "list": [True], "maybe": None}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_what_templates_write_is_allowed(syntax: str) -> None:
    calls = [Call("get_weather", HI), Call("now", {}), Call("get_weather", HI)]
    for count in (1, 3):
        made, ids = required(syntax), written(syntax, calls[:count])
        assert made.try_consume_tokens(ids) == len(ids), seen(syntax, ids, tokens_of(syntax))
        assert made.is_accepting()
    once, two = required(syntax, parallel=False), written(syntax, calls[:2])
    assert once.try_consume_tokens(two) < len(two)
    assert required(syntax).try_consume_tokens(list(b"Well, ")) == 0


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_what_is_drawn_is_read(syntax: str) -> None:
    rng, calls = random.Random(syntax), 0
    made = required(syntax)
    for _ in range(10):
        ids = drawn(made.deep_copy(), rng, 600)
        if ids is not None:
            calls += check(syntax, ids, call_tokens(syntax))
    assert calls > 3


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_marks_that_are_no_tokens_are_spelled(syntax: str) -> None:
    rng, calls = random.Random(syntax), 0
    made = required(syntax, tokens={})
    text = write_calls(syntax, [Call("get_weather", HI | {"kind": "one"}), Call("now", {})])
    assert made.deep_copy().try_consume_tokens(list(text.encode())) == len(text.encode())
    for _ in range(4):
        ids = drawn(made.deep_copy(), rng)
        if ids is not None:
            calls += check(syntax, ids, {})
    assert calls


def follow(syntax: str, made: Constraint, ids: list[int]) -> int:
    """How many of these tokens a guide lets through."""
    matchers = {grammar: matcher(syntax, grammar) for grammar in made.grammars}
    guide = Guide(made, matchers, [FIRST + MARKS])
    for i, token in enumerate(ids):
        allowed = guide.allowed()
        if isinstance(allowed, ByGrammar):
            mask = allowed.matcher.compute_bitmask()
            if not mask[token // 8] >> token % 8 & 1:
                return i
        guide.accept(token)
    return len(ids)


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("as_tokens", [True, False])
def test_strict_functions_in_free_text(syntax: str, as_tokens: bool) -> None:
    """Text is free, then a call holds to its schema, or to none."""
    schemas: dict[str, JSON | None] = {"get_weather": SCHEMA, "now": NOTHING, "free": None}
    tokens = call_tokens(syntax) if as_tokens else {}
    made = constraint_of(form(syntax, schemas=schemas, required=False, tokens=tokens))
    assert bool(made.triggers) == as_tokens

    def ids(calls: list[Call]) -> list[int]:
        if as_tokens:
            return written(syntax, calls)
        return list(write_calls(syntax, calls).encode())

    def passes(found: list[int]) -> bool:
        return follow(syntax, made, found) == len(found)

    said = list("Hé <tool_cal {".encode())
    good, free = Call("get_weather", HI | {"kind": "one"}), Call("free", {"x": "1", "y": [2]})
    assert passes([*said, *ids([good, free]), *said])
    assert passes([*said, *ids([free])] * 2)
    for bad in (Call("rm", {}), Call("get_weather", {"text": "a"}), Call("now", {"a": 1}),
                Call("get_weather", HI | {"number": 13})):  # fmt: skip
        assert not passes([*said, *ids([bad])]), bad
        assert not passes([*said, *ids([good, bad])]), bad
        assert not passes([*ids([good]), *said, *ids([bad])]), bad


REFUSED: dict[str, tuple[JSON, str]] = {
    "uniqueItems": ({"properties": {"a": {"type": "array", "uniqueItems": True}}},
                    "properties.a.uniqueItems"),
    "type": ({"type": "array"}, "type"),
    "impossible": ({"properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}},
                    "required": ["a"]}, "properties.a"),
}  # fmt: skip
OF_TEXTS: dict[str, tuple[JSON, str]] = {
    "format": ({"properties": {"a": {"type": "string", "format": "date"}}}, "properties.a.format"),
    "allOf": ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, "properties.a.allOf"),
    "maxProperties": ({"properties": {"a": {}}, "required": ["a"], "maxProperties": 1},
                      "maxProperties"),
    "additionalProperties": ({"additionalProperties": {"type": "integer"}},
                             "additionalProperties"),
    "name": ({"properties": {"</arg_key>": {}}}, "properties.</arg_key>"),
    "begins": ({"properties": {"a": {"type": "string", "pattern": "^a|b"}}},
               "properties.a.pattern"),
    "alternatives": ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}},
                     "properties.a.pattern"),
    "no type": ({"properties": {"a": {"minimum": 1}}}, "properties.a.minimum"),
    "circle": ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
               "properties.a"),
    "elsewhere": ({"properties": {"a": {}, "b": {"$ref": "#/properties/a"}}}, "$ref"),
}  # fmt: skip


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_what_cannot_be_held_to_is_named(syntax: str) -> None:
    """GLM has no other way to write arguments; DSML has, and the others are JSON."""
    for name, (schema, where) in (REFUSED | OF_TEXTS).items():
        asked = form(syntax, schemas={"now": NOTHING, "f": schema})
        if name not in REFUSED and not syntax.startswith("glm"):
            if name != "circle":
                constraint_of(asked)
            continue
        with pytest.raises(UsageError) as caught:
            constraint_of(asked)
        assert str(caught.value).startswith(f"tools.f.{where}"), (name, str(caught.value))


@pytest.mark.parametrize("syntax", ["deepseek_v4", "glm47"])
def test_texts_as_they_are(syntax: str) -> None:
    def takes(schema: JSON, text: object) -> bool:
        schemas = {"f": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
        ids = written(syntax, [Call("f", {"a": text})])
        return required(syntax, schemas=schemas).try_consume_tokens(ids) == len(ids)

    text = {"type": "string"}
    for schema, good, bad in (
        (text, ["", "</", " a\n", "1", '"x"', "é</b>"], []),
        ({**text, "pattern": "b"}, ["b", "abc"], ["", "a"]),
        ({**text, "pattern": "^b"}, ["b", "bc"], ["ab"]),
        ({**text, "pattern": "b$"}, ["b", "ab"], ["bc"]),
        ({**text, "pattern": r"^/a\$$"}, ["/a$"], ["/a"]),
        ({**text, "pattern": "^(a|/b)$"}, ["a", "/b"], ["b"]),
        ({**text, "minLength": 2, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
        ({**text, "const": "a b"}, ["a b"], ["a"]),
        ({"enum": ["a", "</x>"]}, ["a", "</x>"], ["b"]),
    ):  # fmt: skip
        assert all(takes(schema, each) for each in good), schema
        assert not any(takes(schema, each) for each in bad), schema
    if syntax == "glm47":  # a text that reads as what else it may be would be that
        either = {"type": ["string", "integer", "null"], "minimum": 5, "maxLength": 4}
        assert takes(either, 7)
        assert takes(either, None)
        assert takes(either, "seven"[:4])
        assert not takes(either, "3")
        assert not takes(either, 3)


def test_marks_are_in_no_text(tmp_path: Path) -> None:
    """Tokens that text has to spell, special or not."""
    tokenizer = chat_tokenizer(tmp_path, ["<tool_call>", "</tool_call>"])
    grammar = LLMatcher.grammar_from_json_schema('{"type": "string"}')
    made = LLMatcher(grammar_vocabulary(tokenizer, VOCAB), grammar)
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    assert made.consume_token(quote)
    mask = made.compute_bitmask()
    allowed = {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1}
    assert quote in allowed
    assert not allowed & {FIRST_MARK, FIRST_MARK + 1}


def test_texts_end_where_they_are_closed() -> None:
    """Where marks are spelled, a pattern could go on beyond the first."""
    text = {"type": "string", "pattern": "^(22|1</arg_value>x)$"}
    asked = {"f": {"properties": {"a": text}, "required": ["a"]}}
    made = required("glm47", schemas=asked, tokens={})
    for value, whole in (("22", True), ("1</arg_value>x", False)):
        ids = list(write_calls("glm47", [Call("f", {"a": value})]).encode())
        assert (made.deep_copy().try_consume_tokens(ids) == len(ids)) == whole


def test_no_call_begins_in_reasoning() -> None:
    """Kimi's would end it, and the grammar waits for another end."""
    grammar = constraint_of(form("kimi_k2")).grammar
    assert grammar is not None
    section, end = FIRST + 2, FIRST + 1
    reasoning = Reasoning(end_ids=(end,), without=(section,))
    made = Constraint(name="tools", reasoning=reasoning, grammar=grammar)
    guide = Guide(made, {grammar: matcher("kimi_k2", grammar)}, [FIRST + MARKS])
    assert guide.allowed() == AllBut((FIRST + MARKS, section))
    guide.accept(end)
    assert isinstance(guide.allowed(), ByGrammar)
    free = Guide(Constraint(reasoning=Reasoning(end_ids=(end,), without=(section,))), {}, [1])
    assert free.allowed() == AllBut((section,))


@pytest.mark.slow
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_much_that_is_drawn_is_read(syntax: str) -> None:
    rng, calls = random.Random(syntax), 0
    made = required(syntax)
    for _ in range(1000):
        ids = drawn(made.deep_copy(), rng)
        if ids is not None:
            calls += check(syntax, ids, call_tokens(syntax))
    assert calls > 500
