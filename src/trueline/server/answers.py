"""How the answers of one chat are read, and what their reasoning may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec

from trueline.grammar.constraint import Constraint, Reasoning
from trueline.server.protocol.errors import bad_request
from trueline.server.protocol.prompts import begun
from trueline.server.protocol.requests import ChatRequest
from trueline.text.answers import AnswerFormat, AnswerReader, ReasoningState


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
        if tools is not None and (
            tools.choice == "required" or any(f.strict for f in tools.functions)
        ):
            raise bad_request(
                "tool_choice, strict: not enforced yet; accepted: auto, false", "tools"
            )
        state = format.reasoning_state(ids, begun(asked.conversation))
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

    def constraint(self, content: Constraint | None) -> Constraint | None:
        """`content`: of what follows the reasoning, which is free."""
        budget = self.asked.thinking_budget
        if self.state != "open" or (content is None and budget is None):
            return content
        reasoning = Reasoning(end_ids=self.format.end_ids, budget=budget)
        return msgspec.structs.replace(content or Constraint(), reasoning=reasoning)
