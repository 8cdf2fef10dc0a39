"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from trueline.server.protocol.bodies import (
    KINDS,
    SAMPLING,
    Body,
    Budget,
    Flag,
    Generating,
    Ignored,
    Null,
    TemplateArguments,
    body_with,
    types_of,
)
from trueline.server.protocol.forms import JsonObjectFormat, TextFormat
from trueline.server.protocol.limits import MAX_CHARS, MAX_ITEMS
from trueline.server.protocol.responses_api import items
from trueline.server.protocol.tools import Name
from trueline.utils.json_types import JSON

_ITEM = {
    "anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in items.KINDS.values()]
}
_NOTHING_KEPT = "nothing is kept between requests"


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Annotated[JSON | None, Meta(description="a JSON schema")] = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: Name


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema",
                   forbid_unknown_fields=True):  # fmt: skip
    name: str
    schema: Annotated[JSON, Meta(description="a JSON schema")]
    description: str | None = None
    strict: bool | None = None
    """The answer has the form whatever this says."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["reasoning_effort"])] | None = (
        None
    )
    summary: Literal["auto"] | None = None
    """What there is, which is none: the reasoning is told whole."""
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class Stateful(msgspec.Struct):
    """What would have to be kept, and other fields of OpenAI's that are not offered."""

    store: Annotated[
        Literal[False] | None,
        Meta(description=f"null or false, which is the default: {_NOTHING_KEPT}"),
    ] = None
    previous_response_id: Annotated[
        None,
        Meta(description=f"null: {_NOTHING_KEPT}, and the items of turns before go into input"),
    ] = None
    conversation: Annotated[
        None,
        Meta(description=f"null: {_NOTHING_KEPT}, and a conversation's items go into input"),
    ] = None
    background: Annotated[
        Literal[False] | None,
        Meta(description=f"null or false: {_NOTHING_KEPT}; stream tells an answer as it comes"),
    ] = None
    prompt: Annotated[
        None, Meta(description=f"null: {_NOTHING_KEPT}; its text goes into instructions and input")
    ] = None
    truncation: Annotated[
        Literal["disabled"] | None,
        Meta(description='null or "disabled": what does not fit is refused; leave items out'),
    ] = None
    max_tool_calls: Annotated[
        None, Meta(description="null: the server calls no tools by itself")
    ] = None
    context_management: Null = None
    moderation: Null = None


Input = Annotated[
    Annotated[str, Meta(min_length=1)]
    | Annotated[
        list[Annotated[JSON, Meta(extra_json_schema=_ITEM)]],
        Meta(min_length=1, max_length=MAX_ITEMS["input"]),
    ],
    Meta(
        description="a text that is not empty, or a list of at least one item and up to "
        f'{MAX_ITEMS["input"]}, as {{"role": "user", "content": "hello"}}'
    ),
]
FunctionTools = Annotated[
    Annotated[list[FunctionTool], Meta(max_length=MAX_ITEMS["tools"])] | None,
    Meta(
        description=f"a list of up to {MAX_ITEMS['tools']} functions, as "
        '{"type": "function", "name": "get_weather", "parameters": {...}}'
    ),
]


class ResponsesFields(Body, frozen=True, kw_only=True):
    not_offered: ClassVar[frozenset[str]] = frozenset(Stateful.__struct_fields__)

    input: Input
    instructions: Annotated[str | None, Meta(description="a text")] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="a whole number from 1 up")
    ] = None
    tools: FunctionTools = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | None,
        Meta(
            description='"none", "auto", "required" or {"type": "function", "name": ...}, of tools'
        ),
    ] = None
    parallel_tool_calls: Flag = None
    text: Annotated[
        TextOptions | None,
        Meta(
            description='an object with a format: {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "name": ..., "schema": {...}}'
        ),
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None,
        Meta(description='an object as {"effort": "none"}: a level that the model\'s template has'),
    ] = None
    include: Annotated[
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Meta(max_length=MAX_ITEMS["include"]),
        ]
        | None,
        Meta(
            description=f"a list, of up to {MAX_ITEMS['include']}, of message.output_text.logprobs "
            "and of reasoning.encrypted_content, which is null: reasoning is told openly"
        ),
    ] = None
    stream_options: Annotated[
        ResponseStreamOptions | None,
        Meta(description='null or {"include_obfuscation": false}'),
    ] = None
    thinking_token_budget: Budget = None
    chat_template_kwargs: TemplateArguments = None
    metadata: Annotated[JSON | None, Meta(description="an object")] = None
    user: Annotated[str | None, Meta(description="a text")] = None


class ResponsesGenerationFields(Protocol):
    """Of what is added to the body, the fields that are read by name."""

    stream: bool | None
    top_logprobs: int | None
    truncate_prompt_tokens: int | None
    priority: int | None
    cache_salt: str | None


_OWN_NAMES = ("n", "max_tokens", "logprobs", "prompt_logprobs")
"""Of SamplingParams: what OpenAI has otherwise here, or not at all."""
_SHARED = ("stream", "priority", "cache_salt", "truncate_prompt_tokens")
ResponsesBody = body_with(
    "ResponsesBody",
    ResponsesFields,
    types_of(Ignored, Stateful)
    | {name: types_of(Generating)[name] for name in _SHARED}
    | {name: KINDS[name] for name in SAMPLING if name not in _OWN_NAMES}
    | {"top_logprobs": KINDS["logprobs"]},
)
