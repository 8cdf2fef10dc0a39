"""The items of `input`, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trueline.errors import UsageError, short_repr
from trueline.server.protocol.decode import converted
from trueline.server.protocol.errors import bad_request
from trueline.text.call_arguments import check_arguments
from trueline.text.chat import TEXT_JOINER
from trueline.utils.json_types import JSON, JsonValue

JOINER = "\n\n"
"""Between texts that were items of their own and are one message."""
INSTRUCTING = ("system", "developer")


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text",
                forbid_unknown_fields=True):  # fmt: skip
    text: str


class OutputTextInput(msgspec.Struct, frozen=True, tag_field="type", tag="output_text",
                      forbid_unknown_fields=True):  # fmt: skip
    """As an answer before had it."""

    text: str
    annotations: JsonValue = None
    logprobs: JsonValue = None


class RefusalInput(msgspec.Struct, frozen=True, tag_field="type", tag="refusal",
                   forbid_unknown_fields=True):  # fmt: skip
    refusal: str


class ReasoningTextInput(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text",
                         forbid_unknown_fields=True):  # fmt: skip
    text: str


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputTextInput | RefusalInput]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    arguments: Annotated[str, Meta(description="JSON text")]
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    id: str | None = None
    content: list[ReasoningTextInput] | None = None
    summary: JsonValue = None
    """Not this server's: its reasoning is in the content."""
    encrypted_content: None = None
    status: str | None = None


KINDS: dict[str, type[msgspec.Struct]] = {
    "message": InputMessage,
    "function_call": FunctionCallInput,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningInput,
}
_PARTS = {
    InputMessage: "input_text, output_text, refusal",
    FunctionCallOutput: "input_text",
    ReasoningInput: "reasoning_text",
}
_INSTEAD = {
    "item_reference": "; nothing is kept between requests, so the item itself has to be given",
}


def read_items(items: Sequence[JSON]) -> list[msgspec.Struct]:
    return [_item(f"input[{i}]", item) for i, item in enumerate(items)]


def _item(where: str, item: JSON) -> msgspec.Struct:
    name = item.get("type", "message")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise bad_request(
            f"{where}.type = {short_repr(name)}: accepted: {', '.join(KINDS)}"
            f"{_INSTEAD.get(str(name), '')}",
            f"{where}.type",
        )
    return converted(kind, item, where, _PARTS.get(kind, ""))


class _Turns:
    """Messages in the making: reasoning, text and calls of one turn are one message."""

    def __init__(self) -> None:
        self.messages: list[JSON] = []
        self._names: dict[str, str] = {}
        """Of functions that were called, by the call's id."""
        self._open = False
        """Whether the last message is an assistant's that calls may still join."""

    def message(self, item: InputMessage) -> None:
        role = "system" if item.role in INSTRUCTING else item.role
        text = _text(item.content)
        if role == "assistant":
            turn = self._turn(lambda last: "content" not in last or "tool_calls" in last)
            turn["content"] = turn.get("content", "") + text
            return
        self._open = False
        # templates take instructions once, and first
        if role == "system" and [each["role"] for each in self.messages] == ["system"]:
            self.messages[0]["content"] += JOINER + text
        else:
            self.messages.append({"role": role, "content": text})

    def reasoning(self, item: ReasoningInput) -> None:
        text = "".join(part.text for part in item.content or ())
        if text:
            turn = self._turn(lambda last: "tool_calls" in last)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, where: str, item: FunctionCallInput) -> None:
        try:
            check_arguments(f"{where}.arguments", item.arguments)
        except UsageError as error:
            raise bad_request(str(error), f"{where}.arguments") from None
        if item.call_id in self._names:
            raise bad_request(
                f"{where}.call_id = {short_repr(item.call_id)}: another call has it; accepted: an "
                "id of its own",
                f"{where}.call_id",
            )
        self._names[item.call_id] = item.name
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._turn(lambda last: True).setdefault("tool_calls", []).append(call)

    def output(self, where: str, item: FunctionCallOutput) -> None:
        name = self._names.get(item.call_id)
        if name is None:
            raise bad_request(
                f"{where}.call_id = {short_repr(item.call_id)}: accepted: the call_id of a "
                "function_call that is in input before it",
                f"{where}.call_id",
            )
        self._open = False
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "name": name,
                              "content": _text(item.output)})  # fmt: skip

    def _turn(self, joins: Callable[[JSON], bool]) -> JSON:
        """The assistant's message that an item belongs to: the last one, where it `joins` that."""
        if not (self._open and joins(self.messages[-1])):
            self.messages.append({"role": "assistant"})
            self._open = True
        return self.messages[-1]


def as_messages(instructions: str | None, items: Sequence[msgspec.Struct]) -> list[JSON]:
    """As a chat has them. `instructions` come first; the instructions that follow at once join
    them."""
    turns = _Turns()
    if instructions:
        turns.message(InputMessage(role="system", content=instructions))
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item:
            case InputMessage():
                turns.message(item)
            case ReasoningInput():
                turns.reasoning(item)
            case FunctionCallInput():
                turns.call(where, item)
            case FunctionCallOutput():
                turns.output(where, item)
    return [{"content": None if "tool_calls" in each else ""} | each for each in turns.messages]


def _text(content: str | Sequence[InputText | OutputTextInput | RefusalInput]) -> str:
    if isinstance(content, str):
        return content
    texts = (part.refusal if isinstance(part, RefusalInput) else part.text for part in content)
    return TEXT_JOINER.join(texts)
