"""What calls an answer has to have, or may have, as a constraint."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from trueline.errors import UsageError, short
from trueline.grammar.calls.rules import Rules
from trueline.grammar.calls.schemas import arguments_schema
from trueline.grammar.calls.syntaxes import written
from trueline.grammar.compiled import json_grammar, of_lark, problem_of
from trueline.grammar.constraint import Constraint, Trigger
from trueline.grammar.json_schema import SchemaError, dotted
from trueline.text.formats.choose import CALLS
from trueline.utils.json_types import JSON

MAX_BLAMING_S = 2.0
NAME = "tools"


class CallableFunction(msgspec.Struct, frozen=True):
    name: str
    schema: JSON | None
    """Of its arguments; None: not held to one."""
    where: str
    """The schema's place in the request."""


class CallsForm(msgspec.Struct, frozen=True):
    """Plain data: equal ones have the same grammars."""

    syntax: str
    tokens: Mapping[str, int]
    """The format's marks that are tokens."""
    functions: tuple[CallableFunction, ...]
    required: bool
    """Nothing but calls; else free text, in which a call that is begun is one of these."""
    parallel: bool


def constraint_of(form: CallsForm) -> Constraint:
    """UsageError names the function and the keyword that cannot be held to. May take a second."""
    schemas: dict[str, JSON | None] = {}
    for each in form.functions:
        try:
            schemas[each.name] = None if each.schema is None else arguments_schema(each.schema)
            written(CALLS[form.syntax], Rules({})).function(each.name, schemas[each.name])
        except SchemaError as error:
            raise UsageError(f"{dotted((each.where, *error.path))}: {error.problem}") from None
    # tokens are the model's: what is wrong is so with marks that are spelled, too
    for grammar in _grammars(form, schemas, {}).grammars:
        if problem := problem_of(grammar, NAME):
            _blame(form, schemas)
            raise UsageError(f"{NAME}: {short(problem, 300)}; they cannot be enforced")
    return _grammars(form, schemas, form.tokens)


def _blame(form: CallsForm, schemas: Mapping[str, JSON | None]) -> None:
    """UsageError where a function is wrong by itself."""
    end = time.monotonic() + MAX_BLAMING_S
    for each in form.functions:
        schema = schemas[each.name]
        if schema is None or time.monotonic() > end:
            continue
        json_grammar(schema, each.where)
        for grammar in _grammars(form, {each.name: schema}, {}).grammars:
            if problem := problem_of(grammar, each.where):
                raise UsageError(f"{each.where}: {short(problem, 300)}; it cannot be enforced")


def _grammars(
    form: CallsForm, schemas: Mapping[str, JSON | None], tokens: Mapping[str, int]
) -> Constraint:
    syntax = CALLS[form.syntax]
    rules = Rules(tokens)
    calls = written(syntax, rules)
    if form.required:
        start = calls.all(rules, schemas, form.parallel)
        return Constraint(name=NAME, grammar=of_lark(rules.text(start)))
    if any(len(rules.split(opened)) == 1 for opened in syntax.opens):
        rests = [
            f"{rules.before(opened)} {calls.after(rules, opened, schemas, form.parallel)}"
            for opened in syntax.opens
        ]
        start = f"({' | '.join(rests)})* {rules.without(syntax.opens)}"
        return Constraint(name=NAME, grammar=of_lark(rules.text(start)))
    return Constraint(name=NAME, triggers=_triggers(form, schemas))


def _triggers(form: CallsForm, schemas: Mapping[str, JSON | None]) -> tuple[Trigger, ...]:
    """One for each token that opens calls, whatever it opens."""
    syntax = CALLS[form.syntax]
    found: dict[str, list[tuple[str, str]]] = {}
    for opened in syntax.opens:
        rules = Rules(form.tokens)
        _, token, *more = rules.split(opened)
        found.setdefault(token, []).append((opened, "".join(more)))
    made = []
    for token, opens in found.items():
        rules = Rules(form.tokens)
        calls = written(syntax, rules)
        rests = [
            f"{rules.written(more)} {calls.after(rules, opened, schemas, form.parallel)}"
            for opened, more in opens
        ]
        grammar = of_lark(rules.text(" | ".join(rests)))
        made.append(Trigger(token_ids=(form.tokens[token],), grammar=grammar))
    return tuple(made)
