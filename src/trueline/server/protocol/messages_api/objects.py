"""The JSON of a Message, its blocks, the events of its stream, and errors."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.responses import MalformedToolCall
from trueline.utils.json_types import JSON

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""
    """Nothing is signed."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: JSON


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Without those of the next two."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    malformed_tool_calls: list[MalformedToolCall] | UnsetType = UNSET
    """Not Anthropic's: as in chats."""


class CountedTokens(msgspec.Struct):
    input_tokens: int


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageObject


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None
    malformed_tool_calls: list[MalformedToolCall] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class MessageErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    param: str | None
    """Not Anthropic's, nor is the next: as in other endpoints' errors."""
    code: str | None


class MessageError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: MessageErrorDetail
    request_id: str | None = None


MessageEvent: TypeAlias = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError
)
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(error: ApiError, request_id: str | None = None) -> MessageError:
    """In Anthropic's shape."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return MessageError(
        MessageErrorDetail(kind, error.message, error.param, error.code), request_id
    )
