"""The events of a response's stream."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from trueline.server.protocol.responses import TokenLogprob
from trueline.server.protocol.responses_api.objects import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
)


class Numbered(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int


class _Response(Numbered, kw_only=True):
    response: ResponseObject


class Created(_Response, tag="response.created"):
    pass


class InProgress(_Response, tag="response.in_progress"):
    pass


class Completed(_Response, tag="response.completed"):
    pass


class Incomplete(_Response, tag="response.incomplete"):
    pass


class Failed(_Response, tag="response.failed"):
    pass


class _Item(Numbered, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_Item, tag="response.output_item.added"):
    pass


class ItemDone(_Item, tag="response.output_item.done"):
    pass


class _Within(Numbered, kw_only=True):
    item_id: str
    output_index: int


class _Part(_Within, kw_only=True):
    content_index: int = 0
    part: OutputText | ReasoningText


class PartAdded(_Part, tag="response.content_part.added"):
    pass


class PartDone(_Part, tag="response.content_part.done"):
    pass


class TextDelta(_Within, tag="response.output_text.delta", kw_only=True):
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_Within, tag="response.output_text.done", kw_only=True):
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_Within, tag="response.reasoning_text.delta", kw_only=True):
    content_index: int = 0
    delta: str


class ReasoningDone(_Within, tag="response.reasoning_text.done", kw_only=True):
    content_index: int = 0
    text: str


class ArgumentsDelta(_Within, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_Within, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


ResponseEvent: TypeAlias = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
