"""Which tokens one sequence may draw next: follows what it draws through reasoning, free text and
grammars."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueline.grammar.constraint import Constraint, Reasoning, Trigger

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class Only:
    """These tokens."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBut:
    """Every token but these."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ByGrammar:
    """What the matcher allows, and these tokens, of `ends`; none else of `ends`."""

    matcher: LLMatcher
    allowed_ends: tuple[int, ...]
    ends: tuple[int, ...]


Allowed = Only | AllBut | ByGrammar | None
"""None: every token."""


TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex")
"""Why llguidance stops where a limit is met."""
_LIMITS_MET = re.compile("too many|items; max is", re.IGNORECASE)
"""What it says where it gives no such reason."""


class _Marker:
    """A run of tokens, looked for in what is drawn."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._seen: tuple[int, ...] = ()

    def reset(self) -> None:
        self._seen = ()

    def found(self, token: int) -> bool:
        self._seen = (*self._seen, token)[-len(self.tokens) :]
        return self._seen == self.tokens

    def next_forced(self) -> int:
        """The token that brings the marker nearer: its start may have been drawn."""
        for begun in range(len(self.tokens) - 1, 0, -1):
            if self._seen[-begun:] == self.tokens[:begun]:
                return self.tokens[begun]
        return self.tokens[0]


class Guide:
    """Kept by the executor's first rank beside what else sampling knows of the sequence. Every
    token that the sequence draws is told once, in order; nothing but these decides."""

    def __init__(
        self,
        constraint: Constraint,
        matchers: Mapping[str, LLMatcher],
        eos_ids: Collection[int],
        *,
        ignore_eos: bool = False,
    ) -> None:
        """`matchers`: of each of the constraint's grammars, at its start; not changed."""
        self._constraint, self._matchers = constraint, matchers
        self._eos, self._ignore_eos = tuple(eos_ids), ignore_eos
        self._triggers = [(each, _Marker(each.token_ids)) for each in constraint.triggers]
        self._matcher: LLMatcher | None = None
        self._reasoning = constraint.reasoning
        self._end = _Marker(self._reasoning.end_ids) if self._reasoning else None
        self._num_reasoned = 0
        self._over = False
        self.problem = ""
        """Why the sequence cannot go on; empty where it can."""
        self.too_complex = False
        """A limit was met: the problem is the grammar's."""
        if self._reasoning is None:
            self._begin_content()

    @property
    def name(self) -> str:
        return self._constraint.name

    @property
    def complete(self) -> bool:
        """Nothing can follow."""
        return self._over

    def accept(self, token: int) -> None:
        """The sequence has drawn this token. What comes after its end is dropped by the core."""
        if self._over or self.problem:
            return
        if self._reasoning is not None:
            self._reason(token)
        elif self._matcher is not None:
            self._follow(self._matcher, token)
        else:
            self._look_for_triggers(token)

    def allowed(self) -> Allowed:
        if self._over or self.problem:
            return None
        if self._reasoning is not None:
            return self._in_reasoning(self._reasoning)
        if self._matcher is None:
            return None
        ends = self._eos if not self._ignore_eos and self._matcher.is_accepting() else ()
        return ByGrammar(self._matcher, ends, self._eos)

    def check(self, matcher: LLMatcher) -> None:
        """After its mask was computed: a limit may have been met."""
        if matcher.is_error():
            self._fail(matcher)

    def _fail(self, matcher: LLMatcher, otherwise: str = "") -> None:
        reason = matcher.stop_reason()
        words = matcher.get_error()
        self.too_complex = reason in TOO_COMPLEX or bool(_LIMITS_MET.search(words))
        self.problem = (
            f"{self.name}: the grammar takes more work for a token than the limit"
            if self.too_complex
            else otherwise or words or reason
        )

    def _begin_content(self) -> None:
        if self._constraint.grammar is not None:
            self._matcher = self._matchers[self._constraint.grammar].deep_copy()

    def _reason(self, token: int) -> None:
        assert self._end is not None
        self._num_reasoned += 1
        if self._end.found(token):
            self._reasoning = None
            self._begin_content()

    def _in_reasoning(self, reasoning: Reasoning) -> Allowed:
        assert self._end is not None
        if reasoning.budget is not None and self._num_reasoned >= reasoning.budget:
            return Only((self._end.next_forced(),))
        # an output that ended here would lack what the grammar asks for
        ends = self._eos if self._constraint.grammar is not None else ()
        barred = (*ends, *reasoning.without)
        return AllBut(barred) if barred else None

    def _follow(self, matcher: LLMatcher, token: int) -> None:
        if token in self._eos:
            self._over = True  # it was allowed: the output ends with it
            return
        if not matcher.consume_token(token):
            self._fail(matcher, f"token {token} does not follow")
        elif matcher.is_stopped():
            if not matcher.is_accepting():
                self._fail(matcher)
            elif self._constraint.grammar is not None:
                self._over = True
            else:
                self._matcher = None  # of a trigger: free again
                for _, marker in self._triggers:
                    marker.reset()

    def _look_for_triggers(self, token: int) -> None:
        begun: Trigger | None = None
        for trigger, marker in self._triggers:
            if marker.found(token) and begun is None:
                begun = trigger
        if begun is not None:
            self._matcher = self._matchers[begun.grammar].deep_copy()
