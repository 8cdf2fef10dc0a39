"""What a caller asks of an output's form. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec
from msgspec.structs import force_setattr

from trueline.errors import UsageError, short_repr
from trueline.grammar.compiled import (
    choice_grammar,
    json_grammar,
    lark_grammar,
    read_schema,
    regex_grammar,
)
from trueline.grammar.constraint import Constraint
from trueline.utils.json_types import JsonValue
from trueline.utils.named_fields import NamesUnknownFields

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class StructuredOutputsParams(
    msgspec.Struct,
    metaclass=NamesUnknownFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """One of the first five; the others are about JSON."""

    NOUN: ClassVar[str] = "structured_outputs field"
    NOT_OFFERED: ClassVar[Mapping[str, str]] = {
        "structural_tag": "give a grammar",
        "disable_fallback": "there is one implementation",
        "disable_additional_properties": "say additionalProperties: false in the schema",
    }

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    """In the syntax of Rust's regex crate, without look-around; all of the output matches."""
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """Lark as llguidance knows it, or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """No white space between tokens of JSON; else any."""
    whitespace_pattern: str | None = None
    """A regular expression for white space between tokens of JSON."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            force_setattr(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise UsageError(
                f"structured_outputs has {found}; accepted: exactly one of {', '.join(KINDS)}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                self._refuse(name, "a text that is not empty")
        if self.json_object not in (None, True):
            self._refuse("json_object", "True or False")
        if type(self.disable_any_whitespace) is not bool:
            self._refuse("disable_any_whitespace", "True or False")
        self._check_choice()
        if self.json is not None and not isinstance(self.json, str | Mapping | bool):
            self._refuse("json", "a JSON schema: an object, or its text")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            self._refuse("whitespace_pattern", "None where disable_any_whitespace is True")

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        texts = tuple(self.choice) if isinstance(self.choice, list | tuple) else ()
        if not texts or not all(isinstance(text, str) and text for text in texts):
            self._refuse("choice", "a list of texts that are not empty")
        force_setattr(self, "choice", tuple(dict.fromkeys(texts)))

    def _refuse(self, name: str, accepted: str) -> NoReturn:
        found = short_repr(getattr(self, name))
        raise UsageError(f"structured_outputs.{name} = {found}: accepted: {accepted}")

    def constraint(self, names: Mapping[str, str] | None = None) -> Constraint:
        """As `compiled`."""
        return Constraint(grammar=self.compiled(names), by_client=self.grammar is not None)

    def compiled(self, names: Mapping[str, str] | None = None) -> str:
        """The grammar, as llguidance's text. UsageError where it cannot be honoured, by the name
        that `names` gives instead of ours: another format says the same in fields of its own."""
        called = {name: f"structured_outputs.{name}" for name in KINDS} | dict(names or {})
        if self.regex is not None:
            return regex_grammar(self.regex, called["regex"])
        if self.choice is not None:
            return choice_grammar(self.choice, called["choice"])
        if self.grammar is not None:
            return lark_grammar(self.grammar, called["grammar"])
        name = called["json" if self.json is not None else "json_object"]
        given: Any = ANY_OBJECT if self.json is None else self.json
        schema: JsonValue = read_schema(given, name) if isinstance(given, str) else given
        return json_grammar(
            schema,
            name,
            whitespace=not self.disable_any_whitespace,
            whitespace_pattern=self.whitespace_pattern,
        )


KINDS = ("json", "regex", "choice", "grammar", "json_object")
