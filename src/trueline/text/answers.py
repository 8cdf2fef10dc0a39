"""A model's answers, read off their tokens: which of it is reasoning, content, and calls."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeAlias
from uuid import uuid4

from trueline.text.detokenize import Detokenizer
from trueline.text.formats.calls import CallSyntax
from trueline.text.formats.choose import FoundFormat, find_format
from trueline.text.formats.events import CallStart, Event
from trueline.text.formats.markers import Markers
from trueline.text.formats.parser import ChatFormat, ChatParser, ReasoningSyntax
from trueline.text.formats.values import Functions
from trueline.text.tokenizer import Tokenizer

LAST_TOKENS = 16
"""Of a prompt: it opens the reasoning with these, or not at all."""


ReasoningState: TypeAlias = Literal["open", "over", "not begun"]


class AnswerFormat:
    """How the answers of this tokenizer's model are written."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """The parsers: names to read answers by, in place of what the model's files say."""
        self.tokenizer = tokenizer
        self._token_id = tokenizer.vocabulary.token_id
        encoding = tokenizer.chat_encoding
        self.found: FoundFormat = find_format(
            encoding=None if encoding is None else encoding.calls,
            templates=tokenizer.chat_templates if encoding is None else {},
            has_token=lambda spelling: self._token_id(spelling) is not None,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        spellings = self.format.spellings
        tokens = {each: token for each in spellings if (token := self._token_id(each)) is not None}
        self.tokens = tokens
        """The format's marks that are tokens."""
        self.markers = Markers(spellings, tokens)
        self.special = frozenset(each for each in tokens if tokens[each] in tokenizer.special_ids)
        """Markers that text leaves out along with special tokens."""

    @property
    def format(self) -> ChatFormat:
        return self.found.format

    @property
    def reasoning(self) -> ReasoningSyntax | None:
        return self.format.reasoning

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end reasoning."""
        assert self.reasoning is not None
        return tuple(self.tokenizer.encode(self.reasoning.close, add_special_tokens=False))

    def reasoning_state(self, ids: list[int], said: str = "") -> ReasoningState:
        """Where an answer to this prompt begins. `said`: the beginning of the answer, where the
        prompt ends with one."""
        if self.reasoning is None:
            return "over"
        opened, closed = said.rfind(self.reasoning.open), said.rfind(self.reasoning.close)
        if opened != closed:
            return "open" if opened > closed else "over"
        if self._ends_with(self.reasoning.open, ids, said):
            return "open"
        return "over" if said or self._ends_with(self.reasoning.close, ids, said) else "not begun"

    def _ends_with(self, marker: str, ids: list[int], said: str) -> bool:
        last = ids[-LAST_TOKENS - len(said) :]  # a token is a character at least
        text = self.tokenizer.decode(last, skip_special_tokens=False)
        return text.removesuffix(said).rstrip().endswith(marker)


class AnswerReader:
    """One answer, token by token. `functions`: what it may call; None: calls are content."""

    def __init__(
        self,
        answers: AnswerFormat,
        functions: Functions | None,
        *,
        thinking: bool,
        skip_special_tokens: bool,
        ends_after_call: bool = False,
    ) -> None:
        """`ends_after_call`: there is one call at most."""
        self.ends_after_call = ends_after_call
        self._ids = CallIds(answers.format.calls)
        self._markers = answers.markers.by_token
        self._detokenizer = Detokenizer(answers.tokenizer, skip_special_tokens)
        self._parser = ChatParser(
            answers.format,
            answers.markers,
            functions,
            thinking=thinking,
            hidden=answers.special if skip_special_tokens else frozenset(),
        )

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    def push(self, token: int) -> list[Event]:
        """What is certain now and was not before."""
        mark = self._markers.get(token)
        if mark is None:
            text = self._detokenizer.push([token])
        else:
            text = self._detokenizer.flush() + mark  # half a character before it stays half
        return self._named(self._parser.push(text)) if text else []

    def finish(self) -> list[Event]:
        """When no more tokens come."""
        text = self._detokenizer.flush()
        return self._named([*(self._parser.push(text) if text else []), *self._parser.finish()])

    def _named(self, events: list[Event]) -> list[Event]:
        return [
            replace(event, id=self._ids.of(event)) if isinstance(event, CallStart) else event
            for event in events
        ]


class CallIds:
    """Ids of an answer's calls: those that its format has, and no other call of the answer; else
    made here, in the form that the format wants in prompts."""

    def __init__(self, calls: CallSyntax | None) -> None:
        self._form = None if calls is None else calls.call_id
        self._taken: set[str] = set()

    def of(self, start: CallStart) -> str:
        found = start.id or self._made(start.name, start.index)
        number = start.index
        while found in self._taken:
            found = self._made(start.name, number)
            number += 1
        self._taken.add(found)
        return found

    def _made(self, name: str, number: int) -> str:
        if self._form is None:
            return f"call_{uuid4().hex[:24]}"
        return self._form.format(name=name, number=number)
