"""How the answers of one chat are read, and what their reasoning may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec

from trueline.grammar.calls.forms import CallableFunction, CallsForm
from trueline.grammar.constraint import Constraint, Reasoning
from trueline.server.protocol.errors import bad_request
from trueline.server.protocol.prompts import begun
from trueline.server.protocol.requests import ChatRequest
from trueline.text.answers import AnswerFormat, AnswerReader, ReasoningState


def _check_thinking(asked: bool | None, state: ReasoningState) -> None:
    """What the prompt makes of it, whatever switch there was."""
    if asked is False and state == "open":
        raise bad_request(
            "thinking.type = 'disabled': this model's chat template has no switch for thinking; "
            "accepted: enabled or adaptive",
            "thinking.type",
        )
    if asked and state == "over":
        raise bad_request(
            "thinking.type: this prompt leaves no room for thinking, or the model's files do not "
            "tell how it is marked; accepted: disabled",
            "thinking.type",
        )


@dataclass(frozen=True)
class ChatAnswers:
    format: AnswerFormat
    asked: ChatRequest
    state: ReasoningState

    @classmethod
    def of(cls, format: AnswerFormat, asked: ChatRequest, ids: list[int]) -> ChatAnswers:
        tools = asked.conversation.tools
        if tools is not None and tools.callable and format.format.calls is None:
            raise bad_request(
                "tools: how this model writes calls cannot be told from its files; accepted: "
                'tool_choice "none", or a server started with --tool-call-parser',
                "tools",
            )
        state = format.reasoning_state(ids, begun(asked.conversation))
        _check_thinking(asked.conversation.thinking, state)
        if asked.thinking_budget is not None and state == "not begun":
            raise bad_request(
                "thinking_token_budget: accepted: where the prompt opens the reasoning or ends it; "
                "here it leaves both to the model",
                "thinking_token_budget",
            )
        return cls(format, asked, state)

    @property
    def reader(self) -> partial[AnswerReader] | None:
        """Makes what reads one of them; None: they are their text."""
        tools = self.asked.conversation.tools
        functions = None if tools is None else tools.schemas
        if self.format.reasoning is None and functions is None:
            return None
        return partial(
            AnswerReader,
            self.format,
            functions,
            thinking=self.state == "open",
            skip_special_tokens=self.asked.params.skip_special_tokens,
            ends_after_call=tools is not None and not tools.parallel,
        )

    @property
    def calls_form(self) -> CallsForm | None:
        """What calls have to be like; None: free."""
        asked, calls = self.asked.conversation.tools, self.format.format.calls
        if asked is None or calls is None:
            return None
        required = asked.choice == "required"
        if not required and not any(each.strict for each in asked.callable):
            return None
        return CallsForm(
            syntax=calls.name,
            tokens={s: self.format.tokens[s] for s in calls.spellings if s in self.format.tokens},
            functions=tuple(
                CallableFunction(
                    each.name, each.parameters if required or each.strict else None, each.where
                )
                for each in asked.callable
            ),
            required=required,
            parallel=asked.parallel,
        )

    def constraint(self, content: Constraint | None) -> Constraint | None:
        """`content`: of what follows the reasoning, which is free."""
        budget = self.asked.thinking_budget
        if self.state != "open" or (content is None and budget is None):
            return content
        without = self._opens_calls() if content is not None else ()
        reasoning = Reasoning(end_ids=self.format.end_ids, budget=budget, without=without)
        return msgspec.structs.replace(content or Constraint(), reasoning=reasoning)

    def _opens_calls(self) -> tuple[int, ...]:
        """Tokens that begin calls within reasoning, and end it so: no grammar would begin there."""
        calls, reasoning = self.format.format.calls, self.format.reasoning
        if calls is None or reasoning is None or not reasoning.ended_by_calls:
            return ()
        return tuple(self.format.tokens[each] for each in calls.opens if each in self.format.tokens)
