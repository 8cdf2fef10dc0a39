"""What a client makes of the events of a message, written from Anthropic's description of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
          "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip


def joined_message(events: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The message, after every event was found in its place. A call whose input is no JSON is
    left out, as whole answers do."""
    (first, start), *blocks, (delta, change), (last, _) = events
    assert (first, delta, last) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["output_tokens"] == 0
    index = 0
    while blocks:
        end = next(i for i, (name, _) in enumerate(blocks) if name == "content_block_stop")
        inner, blocks = blocks[: end + 1], blocks[end + 1 :]
        assert {event["index"] for _, event in inner} == {index}
        index += 1
        if (block := _block(inner)) is not None:
            message["content"].append(block)
    return message | change["delta"] | {"usage": change["usage"]}


def _block(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any] | None:
    (name, begun), *deltas, _ = events
    assert name == "content_block_start"
    block: dict[str, Any] = begun["content_block"]
    kind, field = DELTAS[block["type"]]
    assert {name for name, _ in deltas} <= {"content_block_delta"}
    assert {event["delta"]["type"] for _, event in deltas} <= {kind}
    said = "".join(event["delta"][field] for _, event in deltas)
    if block["type"] != "tool_use":
        assert block[field] == ""
        return block | {field: said}
    assert block["input"] == {}
    try:
        return block | {"input": json.loads(said)}
    except json.JSONDecodeError:
        return None
