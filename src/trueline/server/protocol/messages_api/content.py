"""The messages of /v1/messages with their blocks, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trueline.errors import short_repr
from trueline.server.protocol.decode import converted
from trueline.server.protocol.errors import bad_request
from trueline.text.chat import TEXT_JOINER
from trueline.utils.json_types import JSON, JsonValue


class TextBlockInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text",
                     forbid_unknown_fields=True):  # fmt: skip
    text: str
    citations: JsonValue = None
    cache_control: JsonValue = None


class ThinkingBlockInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type",
                         tag="thinking", forbid_unknown_fields=True):  # fmt: skip
    thinking: str
    signature: str | None = None
    """This server signs nothing, and asks for no signature."""


class ToolUseInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use",
                   forbid_unknown_fields=True):  # fmt: skip
    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: JSON
    cache_control: JsonValue = None


class ToolResultInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type",
                      tag="tool_result", forbid_unknown_fields=True):  # fmt: skip
    tool_use_id: str
    content: str | list[TextBlockInput] | None = None
    is_error: bool | None = None
    cache_control: JsonValue = None


class UserMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user"]
    content: str | list[TextBlockInput | ToolResultInput]


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str | list[TextBlockInput | ThinkingBlockInput | ToolUseInput]


class SystemMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system"]
    content: str | list[TextBlockInput]


ROLES: dict[str, type[UserMessage | AssistantMessage | SystemMessage]] = {
    "user": UserMessage,
    "assistant": AssistantMessage,
    "system": SystemMessage,
}
_BLOCKS = {
    "user": "text, tool_result",
    "assistant": "text, thinking, tool_use",
    "system": "text",
}
ERROR = "Error: "
"""Put before a result that is one: chats' templates have no other way to say so."""


def as_messages(system: str | list[TextBlockInput] | None, given: Sequence[JSON]) -> list[JSON]:
    """As a chat has them."""
    found: list[JSON] = [{"role": "system", "content": _text(system)}] if system else []
    names: dict[str, str] = {}
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        match _read(where, message):
            case AssistantMessage(content=content):
                found.append(_assistant(where, content, names))
            case UserMessage(content=content):
                found += _user(where, content, names)
            case SystemMessage(content=content):
                found.append({"role": "system", "content": _text(content)})
    return found


def _read(where: str, message: JSON) -> UserMessage | AssistantMessage | SystemMessage:
    role = message.get("role")
    kind = ROLES.get(role) if isinstance(role, str) else None
    if kind is None or not isinstance(role, str):
        raise bad_request(
            f"{where}.role = {short_repr(role)}: accepted: {', '.join(ROLES)}", f"{where}.role"
        )
    return converted(kind, message, where, _BLOCKS[role])


def _assistant(
    where: str,
    content: str | Sequence[TextBlockInput | ThinkingBlockInput | ToolUseInput],
    names: dict[str, str],
) -> JSON:
    """Its texts are the pieces of one."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    said, thought, calls = "", "", []
    for i, block in enumerate(content):
        match block:
            case TextBlockInput(text=text):
                said += text
            case ThinkingBlockInput(thinking=text):
                thought += text
            case ToolUseInput(id=name, input=arguments):
                if name in names:
                    place = f"{where}.content[{i}].id"
                    raise bad_request(
                        f"{place} = {short_repr(name)}: another tool_use has it; accepted: an id "
                        "of its own",
                        place,
                    )
                names[name] = block.name
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": name, "type": "function", "function": function})
    message: JSON = {"role": "assistant", "content": said or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _user(
    where: str, content: str | Sequence[TextBlockInput | ToolResultInput], names: dict[str, str]
) -> list[JSON]:
    """Each result is a message of its own, and so is the text between them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    found: list[JSON] = []
    for i, block in enumerate(content):
        if isinstance(block, ToolResultInput):
            name, place = names.get(block.tool_use_id), f"{where}.content[{i}].tool_use_id"
            if name is None:
                raise bad_request(
                    f"{place} = {short_repr(block.tool_use_id)}: accepted: the id of a tool_use "
                    "in a message before it",
                    place,
                )
            told = (ERROR if block.is_error else "") + _text(block.content or "")
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name,
                          "content": told})  # fmt: skip
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += TEXT_JOINER + block.text
        else:
            found.append({"role": "user", "content": block.text})
    return found


def _text(content: str | Sequence[TextBlockInput]) -> str:
    if isinstance(content, str):
        return content
    return TEXT_JOINER.join(block.text for block in content)
