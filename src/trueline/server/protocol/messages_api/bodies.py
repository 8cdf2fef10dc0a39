"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from trueline.server.protocol.bodies import (
    KINDS,
    SAMPLING,
    Body,
    Generating,
    Null,
    TemplateArguments,
    body_with,
    types_of,
)
from trueline.server.protocol.limits import MAX_CHARS, MAX_ITEMS
from trueline.server.protocol.messages_api.content import ROLES, TextBlockInput
from trueline.server.protocol.tools import Name
from trueline.utils.json_types import JSON, JsonValue

_MESSAGE = {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in ROLES.values()]}


class InputTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    input_schema: Annotated[JSON, Meta(description="a JSON schema")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: JsonValue = None
    eager_input_streaming: bool | None = None
    """It always is."""


class AutoChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="auto",
                 forbid_unknown_fields=True):  # fmt: skip
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="any",
                forbid_unknown_fields=True):  # fmt: skip
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool",
                    forbid_unknown_fields=True):  # fmt: skip
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(msgspec.Struct, frozen=True, tag_field="type", tag="none",
                   forbid_unknown_fields=True):  # fmt: skip
    pass


class ThinkingEnabled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="enabled",
                      forbid_unknown_fields=True):  # fmt: skip
    budget_tokens: Annotated[int, Meta(ge=0)]
    display: Literal["summarized"] | None = None
    """It is told whole."""


class ThinkingAdaptive(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="adaptive",
                       forbid_unknown_fields=True):  # fmt: skip
    display: Literal["summarized"] | None = None


class ThinkingDisabled(msgspec.Struct, frozen=True, tag_field="type", tag="disabled",
                       forbid_unknown_fields=True):  # fmt: skip
    pass


class OutputSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Annotated[JSON, Meta(description="a JSON schema")]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["reasoning_effort"])] | None = (
        None
    )
    format: OutputSchema | None = None


class Elsewhere(msgspec.Struct):
    """Fields of Anthropic's that are not offered."""

    container: Null = None
    context_management: Null = None
    mcp_servers: Null = None
    diagnostics: Null = None
    inference_geo: Null = None
    speed: Annotated[Literal["standard"] | None, Meta(description='null or "standard"')] = None


class Unread(msgspec.Struct):
    """Fields that cannot change the answer."""

    metadata: JsonValue = None
    service_tier: JsonValue = None
    cache_control: JsonValue = None


InputTools = Annotated[
    Annotated[list[InputTool], Meta(max_length=MAX_ITEMS["tools"])] | None,
    Meta(
        description=f"a list of up to {MAX_ITEMS['tools']} tools of one's own, as "
        '{"name": "get_weather", "input_schema": {...}}'
    ),
]


MessageList = Annotated[
    list[Annotated[JSON, Meta(extra_json_schema=_MESSAGE)]],
    Meta(
        min_length=1,
        max_length=MAX_ITEMS["messages"],
        description=f"a list of at least one message and up to {MAX_ITEMS['messages']}, as "
        '{"role": "user", "content": "hello"}',
    ),
]


class MessagesInput(Body, frozen=True, kw_only=True):
    not_offered: ClassVar[frozenset[str]] = frozenset(Elsewhere.__struct_fields__)

    messages: MessageList
    system: Annotated[
        str | list[TextBlockInput] | None, Meta(description="a text, or a list of text blocks")
    ] = None
    tools: InputTools = None
    tool_choice: Annotated[
        AutoChoice | AnyChoice | OneToolChoice | NoToolChoice | None,
        Meta(
            description='{"type": "auto"}, {"type": "any"}, {"type": "none"} or '
            '{"type": "tool", "name": ...}, of tools'
        ),
    ] = None
    thinking: Annotated[
        ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None,
        Meta(
            description='{"type": "disabled"}, {"type": "adaptive"} or '
            '{"type": "enabled", "budget_tokens": ...}'
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        Meta(description="an object with an effort that the model's template has, or a format"),
    ] = None
    chat_template_kwargs: TemplateArguments = None


class MessagesFields(MessagesInput, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, description="a whole number from 1 up")]
    stop_sequences: Annotated[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["stop"])]],
            Meta(max_length=MAX_ITEMS["stop"]),
        ]
        | None,
        Meta(
            description=f"a list of up to {MAX_ITEMS['stop']} texts that are not empty, of up to "
            f"{MAX_CHARS['stop']} characters each"
        ),
    ] = None


_OWN_NAMES = ("n", "max_tokens", "stop", "logprobs", "prompt_logprobs")
"""Of SamplingParams: what Anthropic has otherwise, or not at all."""
_UNSAID = types_of(Unread, Elsewhere)
MessagesBody = body_with(
    "MessagesBody",
    MessagesFields,
    _UNSAID
    | {name: types_of(Generating)[name] for name in ("stream", "priority", "cache_salt")}
    | {name: KINDS[name] for name in SAMPLING if name not in _OWN_NAMES},
)
CountTokensBody = body_with("CountTokensBody", MessagesInput, _UNSAID)
