"""Texts that stand in a call as they are, without JSON's quotation marks: their schemas as Lark."""

from __future__ import annotations

from collections.abc import Collection

from trueline.grammar.calls.rules import ANY, escaped, literal
from trueline.grammar.json_schema import SchemaError
from trueline.utils.json_types import JSON, JsonValue

KEYWORDS = ("const", "enum", "maxLength", "minLength", "pattern", "type")
READ_AS = {
    "null": r"\s*null\s*",
    "boolean": r"\s*(true|false)\s*",
    "integer": rf"\s*-?[0-9]{ANY}",
    "number": rf"\s*-?[0-9]{ANY}",
    "object": rf"\s*\{{{ANY}",
    "array": rf"\s*\[{ANY}",
}
"""Texts that a parser may take for JSON of these types where a value may have them."""


def raw_text(schema: JSON, path: tuple[str, ...], types: Collection[str] = ()) -> str:
    """The terminal for a schema of texts. `types`: those that the value may have besides.
    SchemaError where a keyword cannot be held to."""
    for keyword in schema:
        if keyword not in KEYWORDS:
            accepted = ", ".join(KEYWORDS)
            raise SchemaError(
                (*path, keyword),
                f"{keyword} is not enforced of a text in this model's calls; accepted: {accepted}",
            )
    found = [f"~/{READ_AS[name]}/" for name in sorted(types) if name in READ_AS]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        found.append(_one_of(values, schema, path))
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        found.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
    if "pattern" in schema:
        found.append(f"/{_whole(schema['pattern'], (*path, 'pattern'))}/")
    return " & ".join([f"/{ANY}/", *found])


def _one_of(values: JsonValue, schema: JSON, path: tuple[str, ...]) -> str:
    both = "const" in schema and "enum" in schema
    texts = [each for each in values if isinstance(each, str)]
    if both or not texts:
        name = "const" if "const" in schema else "enum"
        raise SchemaError((*path, name), "accepted: texts, and one of const and enum")
    return f"({' | '.join(map(literal, texts))})"


def _whole(pattern: str, path: tuple[str, ...]) -> str:
    """JSON Schema looks for a pattern within the text; Lark's matches all of it."""
    begins, ends = pattern.startswith("^"), _ends(pattern)
    inner = pattern[1 if begins else 0 : len(pattern) - 1 if ends else None]
    if (begins or ends) and "|" in _outside(inner):
        raise SchemaError(path, "accepted: alternatives in brackets, as ^(a|b)$")
    return f"{'' if begins else ANY}({_slashes(inner)}){'' if ends else ANY}"


def _ends(pattern: str) -> bool:
    before = pattern.removesuffix("$")
    escapes = len(before) - len(before.rstrip("\\"))
    return before != pattern and escapes % 2 == 0


def _outside(pattern: str) -> str:
    """What is in no brackets."""
    found, depth, escape, within = "", 0, False, False
    for char in pattern:
        if escape:
            escape = False
        elif char == "\\":
            escape = True
        elif within:
            within = char != "]"
        elif char == "[":
            within = True
        else:
            depth += (char == "(") - (char == ")")
            found += char if depth == 0 else ""
    return found


def _slashes(pattern: str) -> str:
    """Without slashes and line ends of its own, which would end it in Lark."""
    found, escape = [], False
    for char in pattern:
        plain = char not in "/\n\r"
        found.append(char if plain else escaped(char)[1 if escape and char == "/" else 0 :])
        escape = char == "\\" and not escape
    return "".join(found)
