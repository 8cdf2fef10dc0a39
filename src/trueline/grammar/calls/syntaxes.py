"""How each format writes calls, word for word as its template or encoding does: what
`text/formats` reads, with arguments by their schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trueline.grammar.calls.parameters import each_parameter, json_value, plain_value
from trueline.grammar.calls.raw_text import raw_text
from trueline.grammar.calls.rules import ANY, Rules, literal
from trueline.grammar.calls.schemas import resolved
from trueline.grammar.json_schema import SchemaError
from trueline.text.formats import deepseek_v3, dsml, glm, hermes, kimi_k2
from trueline.text.formats.calls import CallSyntax
from trueline.text.formats.values import TEXT, types_of
from trueline.utils.json_types import JSON, JsonValue

LINE_END = "\n"
ANY_OBJECT: JSON = {"type": "object"}
_KEY = r'/[^\s<>"|｜]{1,64}/'
Function = Callable[[str, JSON | None], str]
"""Of a name and the schema of its arguments (None: any), the middle of a call."""


@dataclass(frozen=True)
class Written:
    """A call is `begin`, one of its functions, `end`. Several have `between` between them, and
    `section` around all."""

    begin: str
    end: str
    between: str
    function: Function
    section: tuple[str, str] | None = None
    lead: str = "\n"
    """What may stand before the first."""

    def after(self, rules: Rules, opened: str, functions: Mapping[str, JSON | None],
              parallel: bool) -> str:  # fmt: skip
        """The rest of calls, behind the mark that opened them: to their end."""
        one = rules.rule(
            " | ".join(self.function(name, schema) for name, schema in functions.items())
        )
        end = rules.written(self.end)
        if opened == self.begin:
            return f"{one} {end}"
        assert self.section is not None
        another = f"({rules.written(self.between + self.begin)} {one} {end})*" if parallel else ""
        first = rules.written(self.section[0].removeprefix(opened) + self.begin)
        return f"{first} {one} {end} {another} {rules.written(self.section[1])}"

    def all(self, rules: Rules, functions: Mapping[str, JSON | None], parallel: bool) -> str:
        """Calls and nothing else, at least one."""
        lead = f"({literal(self.lead)} {literal(self.lead)}?)?"
        if self.section is not None:
            opened, _ = self.section
            rest = self.after(rules, opened, functions, parallel)
            return f"{lead} {rules.written(opened)} {rest}"
        rest = rules.rule(self.after(rules, self.begin, functions, parallel))
        another = f"({rules.written(self.between + self.begin)} {rest})*" if parallel else ""
        return f"{lead} {rules.written(self.begin)} {rest} {another}"


def written(syntax: CallSyntax, rules: Rules) -> Written:
    match syntax:
        case deepseek_v3.DeepSeekV3Calls():
            return _deepseek_v3(syntax, rules)
        case kimi_k2.KimiK2Calls():
            return _kimi_k2(rules)
        case hermes.HermesCalls():
            return _hermes(rules)
        case glm.GlmCalls():
            return _glm(syntax, rules)
        case dsml.DsmlCalls():
            return _dsml(syntax, rules)
    raise AssertionError(f"{syntax.name} has no grammar")


def _deepseek_v3(syntax: deepseek_v3.DeepSeekV3Calls, rules: Rules) -> Written:
    separator = deepseek_v3.SEPARATOR

    def function(name: str, schema: JSON | None) -> str:
        arguments = rules.json(schema or ANY_OBJECT)
        if not syntax.fenced:
            return f"{rules.written(name + separator)} {arguments}"
        head = f"function{separator}{name}\n{deepseek_v3.FENCE}\n"
        return f"{rules.written(head)} {arguments} {literal(LINE_END + deepseek_v3.END_FENCE)}"

    around = (deepseek_v3.CALLS, deepseek_v3.END_CALLS)
    between = "\n" if syntax.fenced else ""
    return Written(deepseek_v3.CALL, deepseek_v3.END_CALL, between, function, around)


def _kimi_k2(rules: Rules) -> Written:
    def function(name: str, schema: JSON | None) -> str:
        head = literal(f"{kimi_k2.PREFIX}{name}:")
        arguments = rules.json(schema or ANY_OBJECT)
        return f"{head} /[0-9]{{1,3}}/ {rules.written(kimi_k2.ARGUMENTS)} {arguments}"

    around = (kimi_k2.SECTION, kimi_k2.END_SECTION)
    return Written(kimi_k2.CALL, kimi_k2.END_CALL, "", function, around)


def _hermes(rules: Rules) -> Written:
    def function(name: str, schema: JSON | None) -> str:
        head = literal(f'\n{{"name": "{name}", "arguments": ')
        return f"{head} {rules.json(schema or ANY_OBJECT)} {literal('}' + LINE_END)}"

    return Written(hermes.CALL, hermes.END_CALL, "\n", function)


def _glm(syntax: glm.GlmCalls, rules: Rules) -> Written:
    end = "\n" if syntax.line_ends else ""
    others = (glm.END_CALL, glm.CALL)

    def pair(key: str, value: str) -> str:
        head = f"{rules.written(glm.KEY)} {key} {rules.written(glm.END_KEY + end + glm.VALUE)}"
        return f"{head} {value} {literal(end)}"

    def parameter(name: str, schema: JsonValue, root: JSON, path: tuple[str, ...]) -> str:
        value = plain_value(rules, schema, root, path, glm.END_VALUE, others)
        return pair(literal(name), value)

    def function(name: str, schema: JSON | None) -> str:
        if schema is not None:
            return f"{literal(name + end)} {each_parameter(schema, parameter)}"
        value = rules.until(f"/{ANY}/", glm.END_VALUE, others)
        return f"{literal(name + end)} ({pair(rules.terminal(_KEY), value)})*"

    return Written(glm.CALL, glm.END_CALL, end, function)


def _dsml(syntax: dsml.DsmlCalls, rules: Rules) -> Written:
    begin, end = f"<{dsml.DSML}{syntax.block}>", f"</{dsml.DSML}{syntax.block}>"
    others = (dsml.END_INVOKE, dsml.INVOKE, end)
    as_text, as_json = (f'" string="{kind}">' for kind in ("true", "false"))
    line_end = literal(LINE_END)

    def parameter(name: str, schema: JsonValue, root: JSON, path: tuple[str, ...]) -> str:
        head = rules.written(dsml.PARAMETER + name)
        schema = resolved(schema, root, path)
        if types_of(schema, root) == TEXT:
            try:
                value = rules.until(raw_text(schema, path), dsml.END_PARAMETER, others)
                return f"{head} {literal(as_text)} {value} {line_end}"
            except SchemaError:
                pass  # then as JSON, which the format has too
        value = f"{json_value(rules, schema, root)} {rules.written(dsml.END_PARAMETER)}"
        return f"{head} {literal(as_json)} {value} {line_end}"

    def any_parameters() -> str:
        """None of them held to a type."""
        text = rules.until(f"/{ANY}/", dsml.END_PARAMETER, others)
        value = f"{rules.json({})} {rules.written(dsml.END_PARAMETER)}"
        kinds = f"({literal(as_text)} {text} | {literal(as_json)} {value})"
        return f"({rules.written(dsml.PARAMETER)} {rules.terminal(_KEY)} {kinds} {line_end})*"

    def function(name: str, schema: JSON | None) -> str:
        head = literal(f'{name}">\n')
        if schema is None:
            return f"{head} ({any_parameters()} | {rules.json(ANY_OBJECT)} {line_end})"
        try:
            # one without parameters has an empty line, or none
            return f"{head} {each_parameter(schema, parameter) or f'{line_end}?'}"
        except SchemaError:  # then all as one object
            return f"{head} {rules.json(schema)} {line_end}"

    return Written(dsml.INVOKE, dsml.END_INVOKE + "\n", "", function, (begin + "\n", end))
