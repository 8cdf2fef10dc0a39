"""Grammars as llguidance's text, checked: what is said in a schema, a regular expression, a choice
or a grammar holds for every output, or is refused here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from trueline.errors import UsageError, short, short_repr
from trueline.grammar.json_schema import SchemaError, dotted, enforced, parts
from trueline.grammar.json_strict import strict
from trueline.grammar.vocabulary import byte_vocabulary
from trueline.utils.json_types import JSON, JsonValue

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_BYTES = 1 << 18
"""Of a schema, an expression, all choices together, or a grammar."""
MAX_CHOICES = 4096
MAX_BLAMED, MAX_BLAMING_S = 256, 2.0
"""Parts of a schema that are looked at to name the keyword that another one does not go with, and
how long."""

LIMITS: Final[dict[str, int]] = {
    "max_items_in_row": 2_000,  # an object with 400 optional properties has 1,600
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # 16 MB
    "max_grammar_size": 200_000,
}
"""Of llguidance: of a grammar as it is compiled, and of each token's mask. A compilation takes less
than a second, a mask some milliseconds."""
LIMITS_OF_CLIENTS: Final = LIMITS | {
    "max_items_in_row": 500,  # an ambiguous one takes time with the square of it, for every byte
    "max_grammar_size": 10_000,  # %json of it has no limit of ours
}
"""Of grammars that clients write."""


def parser_limits(*, by_client: bool = False) -> LLParserLimits:
    """`by_client`: of a grammar that a client has written; not of what is made of its schema."""
    from llguidance import LLParserLimits

    limits = LIMITS_OF_CLIENTS if by_client else LIMITS
    return LLParserLimits(
        max_items_in_row=limits["max_items_in_row"],
        initial_lexer_fuel=limits["initial_lexer_fuel"],
        step_lexer_fuel=limits["step_lexer_fuel"],
        step_max_items=limits["step_max_items"],
        max_lexer_states=limits["max_lexer_states"],
        max_grammar_size=limits["max_grammar_size"],
        verbose_errors=False,
    )


def json_grammar(
    schema: JsonValue,
    name: str = "json",
    *,
    whitespace: bool = True,
    whitespace_pattern: str | None = None,
) -> str:
    """Of JSON that the schema accepts. `name`: what errors call the schema. `whitespace`: False for
    none between tokens of JSON."""
    options: JSON = {"whitespace_flexible": whitespace}
    try:
        kept = enforced(schema)
        if kept is False:
            raise SchemaError((), "found false; accepted: a schema that accepts something")
        kept, letters = strict({} if kept is True else kept)
    except SchemaError as error:
        where = dotted((name, *error.path))
        raise UsageError(f"{where}: {error.problem}") from None
    if letters is not None:
        options["json_allowed_escapes"] = letters
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = _only_space(whitespace_pattern)
    try:
        made = _of_schema(kept, options)
    except (TypeError, UnicodeError) as error:  # not from a request, which is JSON
        raise UsageError(f"{name}: not JSON ({error})") from None
    _check_length(made, name)
    if problem := _problem(made):
        path, words = _blamed(kept, options, problem)
        raise UsageError(f"{dotted((name, *path))}: {words}; it cannot be enforced")
    return made


def regex_grammar(regex: str, name: str = "regex") -> str:
    """Of text that the expression matches from its start to its end."""
    from llguidance import LLMatcher

    _check_length(regex, name)
    return _checked(LLMatcher.grammar_from_regex(regex), name)


def choice_grammar(choices: Sequence[str], name: str = "choice") -> str:
    from llguidance import LLMatcher

    if len(choices) > MAX_CHOICES:
        raise UsageError(f"{name}: {len(choices)} texts; accepted: up to {MAX_CHOICES}")
    _check_length("".join(choices), name)
    # all escaped: Lark has no DEL as it is
    texts = " | ".join(map(json.dumps, choices))
    return _checked(LLMatcher.grammar_from_lark(f"start: {texts}"), name)


def lark_grammar(grammar: str, name: str = "grammar") -> str:
    """`grammar`: Lark as llguidance knows it, with `%json {...}` for schemas, or GBNF."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    _check_length(grammar, name)
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # of whatever kind: a parser's own
        raise UsageError(
            f"{name}: not a grammar in Lark or GBNF: {short(str(error), 200)}"
        ) from None
    return _checked(LLMatcher.grammar_from_lark(lark), name, by_client=True)


def of_lark(lark: str) -> str:
    """Made here, not by a client: unchecked."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(lark))


def problem_of(grammar: str, name: str) -> str:
    """Empty where there is none."""
    _check_length(grammar, name)
    return _problem(grammar)


def _checked(made: str, name: str, *, by_client: bool = False) -> str:
    if problem := _problem(made, by_client=by_client):
        raise UsageError(f"{name}: {short(problem, 300)}")
    return made


def _check_length(text: str, name: str) -> None:
    if (length := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise UsageError(f"{name}: {length} bytes; accepted: up to {MAX_BYTES}")


def _of_schema(schema: JsonValue, options: JSON) -> str:
    from llguidance import LLMatcher

    text = msgspec.json.encode(schema).decode()
    return str(LLMatcher.grammar_from_json_schema(text, overrides=options))  # type: ignore[arg-type]


def _problem(grammar: str, *, by_client: bool = False) -> str:
    """In llguidance's words; empty where there is none. Other threads go on meanwhile."""
    from llguidance import LLMatcher

    limits = parser_limits(by_client=by_client)
    failed, words = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if failed:
        return " ".join(words[0].split())
    # what takes too long to start, or has no text, shows only now; bytes as tokens cost little
    made = LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=limits)
    if not made.is_error():
        made.compute_bitmask()
    if not made.is_error():
        return ""
    problem = made.get_error()
    return "no text is possible" if problem.startswith("NoExtensionBias") else problem


def _only_space(pattern: str) -> str:
    """UsageError where it matches something else: the output would be no JSON."""
    alone = {"type": "string", "pattern": f"^(?:{pattern})$"}
    other = {**alone, "allOf": [{"pattern": "[^ \\t\\n\\r]"}]}
    if "Unsatisfiable" not in _problem(_of_schema(other, {})):
        accepted = "a regular expression for spaces, tabs and line ends alone"
        raise UsageError(
            f"structured_outputs.whitespace_pattern = {short_repr(pattern)}: accepted: {accepted}"
        )
    return pattern


def _blamed(schema: JsonValue, options: JSON, problem: str) -> tuple[tuple[str, ...], str]:
    """Where in the schema the problem is, as far as its parts by themselves show it: the innermost
    schema that has a problem, and of its keywords the last that has to go until there is none."""
    if not isinstance(schema, dict):
        return (), problem
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: tuple[str, ...] = ()
    inner: JSON = schema
    left, end = [MAX_BLAMED], time.monotonic() + MAX_BLAMING_S

    def wrong(part: JSON) -> str:
        left[0] -= 1
        if left[0] < 0 or time.monotonic() > end:
            return ""
        return _problem(_of_schema({**shared, **part}, options))

    while found := next(
        ((at, part, words) for at, part in parts(inner) if (words := wrong(part))), None
    ):
        path, inner, problem = (*path, *found[0]), found[1], found[2]
    rest = inner
    for keyword in inner:
        if keyword not in ("$defs", "definitions", "type"):
            rest = {key: value for key, value in rest.items() if key != keyword}
            if not wrong(rest):
                return (*path, keyword), short(problem, 300)
    return path, short(problem, 300)


def read_schema(text: str, name: str = "json") -> JsonValue:
    """Of JSON text."""
    _check_length(text, name)
    try:
        value: JsonValue = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise UsageError(f"{name} = {short_repr(text)}: not JSON ({error})") from None
    return value
