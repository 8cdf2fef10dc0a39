"""The JSON of a Response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from trueline.server.protocol.responses import MalformedToolCall, TokenLogprob
from trueline.server.protocol.responses_api.bodies import (
    FunctionChoice,
    FunctionTool,
    ReasoningOptions,
    TextOptions,
)
from trueline.utils.json_types import JSON

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[JSON]
    logprobs: list[TokenLogprob]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus
    summary: list[JSON]
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """incomplete: it cannot be made."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """With the fields of the request that it answers."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    parallel_tool_calls: bool
    text: TextOptions
    reasoning: ReasoningOptions
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: JSON
    user: str | None
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"
    malformed_tool_calls: list[MalformedToolCall] | UnsetType = UNSET
    """Not OpenAI's: as in chats."""
