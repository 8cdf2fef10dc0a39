"""What a client makes of the events of a response, written from OpenAI's description of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTENT = {"message": ("output_text", "text"), "reasoning": ("reasoning_text", "text")}
TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def joined_response(events: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The response of the last event, after every event before it was found in its place."""
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    (first, created), (second, started), *rest, (last, ended) = events
    assert (first, second) == ("response.created", "response.in_progress")
    for begun in (created["response"], started["response"]):
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    response: dict[str, Any] = ended["response"]
    assert last == f"response.{response['status']}"
    items: list[dict[str, Any]] = []
    while rest:
        rest = _read_item(rest, items)
    assert response["output"] == items
    changed = ("status", "output", "usage", "incomplete_details", "malformed_tool_calls")
    for name in response.keys() - {*changed}:
        assert response[name] == created["response"][name], name
    return response


def _read_item(
    events: list[tuple[str, dict[str, Any]]], items: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """What follows the item that the events begin with."""
    name, added = events[0]
    assert name == "response.output_item.added"
    item = added["item"]
    assert item["status"] == "in_progress"
    end = next(i for i, (name, _) in enumerate(events) if name == "response.output_item.done")
    done = events[end][1]
    assert added["output_index"] == done["output_index"] == len(items)
    inner = events[1:end]
    for _, event in inner:
        assert (event["item_id"], event["output_index"]) == (item["id"], len(items))
    if item["type"] == "function_call":
        said = _joined(inner, "response.function_call_arguments", "arguments")
        assert inner[-1][1]["name"] == item["name"]
        assert item["arguments"] == ""
        assert done["item"] == item | {"arguments": said, "status": done["item"]["status"]}
    else:
        kind = item["type"]
        (begins, part), *middle, (ends, whole) = inner
        assert (begins, ends) == ("response.content_part.added", "response.content_part.done")
        assert part["part"]["type"] == CONTENT[kind][0]
        assert part["part"]["text"] == ""
        said = _joined(middle, TEXTS[kind], "text")
        assert whole["part"] == part["part"] | {"text": said} | _scores(middle)
        assert {event["content_index"] for _, event in inner} == {0}
        assert done["item"] == item | {"content": [whole["part"]], "status": done["item"]["status"]}
    items.append(done["item"])
    return events[end + 1 :]


def _joined(events: list[tuple[str, dict[str, Any]]], prefix: str, field: str) -> str:
    *deltas, (last, done) = events
    assert {name for name, _ in deltas} <= {f"{prefix}.delta"}
    assert last == f"{prefix}.done"
    said = "".join(event["delta"] for _, event in deltas)
    assert done[field] == said
    return said


def _scores(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    *deltas, (_, done) = events
    if "logprobs" not in done:
        return {}
    joined = [score for _, event in deltas for score in event["logprobs"]]
    assert done["logprobs"] == joined
    return {"logprobs": joined}
