"""What the core is told of an output's form: grammars as text, and when they begin. Token ids and
grammars only, so that it crosses a process boundary as it is."""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """The output begins with reasoning, which is free."""

    end_ids: tuple[int, ...]
    """The tokens of the marker that ends it."""
    budget: int | None = None
    """After so many tokens without the marker, it is forced, token by token."""
    without: tuple[int, ...] = ()
    """Tokens that would end it in a way of their own, and are not drawn in it."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """Once the output ends with these tokens, what follows is the grammar's until that can go no
    further; then the output is free again."""

    token_ids: tuple[int, ...]
    grammar: str


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """In this order: reasoning, where there is any; then either all of the rest by one grammar, or
    free text with triggers, or free text.

    A grammar is llguidance's own text for it: `trueline.grammar.compiled` has functions that make
    one. It says when the output may end: an end token comes only where the grammar may end, and
    where it can go no further the output ends by itself. Reasoning before a grammar has no end
    token."""

    name: str = "structured_outputs"
    """The request's field that asks for it: errors begin with it."""
    reasoning: Reasoning | None = None
    grammar: str | None = None
    by_client: bool = False
    """The grammar is as a client has written it: it may be ambiguous, and has narrower limits."""
    triggers: tuple[Trigger, ...] = ()

    def __post_init__(self) -> None:
        assert self.grammar is None or not self.triggers, "a grammar leaves nothing free"
        markers = [trigger.token_ids for trigger in self.triggers]
        markers += [self.reasoning.end_ids] if self.reasoning else []
        assert all(markers), "a marker has at least one token"

    @property
    def grammars(self) -> tuple[str, ...]:
        """All of them, each once."""
        own = () if self.grammar is None else (self.grammar,)
        return tuple(dict.fromkeys((*own, *(trigger.grammar for trigger in self.triggers))))
