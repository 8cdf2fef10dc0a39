"""Anthropic's client, through /v1/messages."""

from typing import Literal

import anthropic
from anthropic import Anthropic
from cases import (
    ASKED,
    CITIES,
    DESCRIPTION,
    DRAWN,
    PROMPT,
    TOKENS,
    check_trip,
    check_weather,
    run,
)
from pydantic import BaseModel, Field

client = Anthropic(base_url=ASKED["url"].removesuffix("/v1"), api_key="none", max_retries=0)
USER = {"role": "user", "content": PROMPT}
ALWAYS = {"model": ASKED["model"], "messages": [USER], "max_tokens": TOKENS,
          "extra_body": {"temperature": 0}}  # fmt: skip
DISABLED = {"type": "disabled"}
FORMED = ALWAYS | {"max_tokens": 700, "extra_body": DRAWN, "thinking": DISABLED}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": DESCRIPTION, "input_schema": WEATHER}
ONCE = {"type": "any", "disable_parallel_tool_use": True}


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    sunny: bool


def message():
    answer = client.messages.create(**ALWAYS, thinking=DISABLED)
    (said,) = answer.content
    assert said.text == ASKED["text"]
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == TOKENS
    assert answer.role == "assistant"


def stream():
    with client.messages.stream(**ALWAYS, thinking=DISABLED) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == final.content[0].text == ASKED["text"]
    assert final.usage.output_tokens == TOKENS


def raw_events():
    kinds = [e.type for e in client.messages.create(**ALWAYS, thinking=DISABLED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def thinking():
    budget = {"type": "enabled", "budget_tokens": 8}
    answer = client.messages.create(**ALWAYS | {"max_tokens": 24}, thinking=budget)
    thought, *rest = answer.content
    assert thought.thinking == ASKED["reasoning"]
    assert "".join(block.text for block in rest) == ASKED["after"]
    assert answer.usage.output_tokens_details.thinking_tokens == 8
    with client.messages.stream(**ALWAYS | {"max_tokens": 24}, thinking=budget) as events:
        streamed = events.get_final_message().content
    assert [each.type for each in streamed] == [each.type for each in answer.content]
    assert streamed[0].thinking == thought.thinking
    turn = [USER, {"role": "assistant", "content": answer.content}, USER]
    client.messages.create(**ALWAYS | {"messages": turn}, thinking=DISABLED)


def tools():
    answer = client.messages.create(**FORMED, tools=[TOOL], tool_choice=ONCE)
    (use,) = answer.content
    assert answer.stop_reason == "tool_use"
    assert use.name == "get_weather"
    check_weather(use.input)
    with client.messages.stream(**FORMED, tools=[TOOL], tool_choice=ONCE) as events:
        kinds = {event.type for event in events}
        (streamed,) = events.get_final_message().content
    assert "input_json" in kinds
    assert (streamed.name, streamed.input) == (use.name, use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turn = [USER, {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]}]  # fmt: skip
    asked = {"messages": turn, "tools": [TOOL], "thinking": DISABLED}
    then = client.messages.create(**ALWAYS | asked)
    counted = client.messages.count_tokens(model=ASKED["model"], **asked)
    usage = then.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def structured():
    answer = client.messages.parse(**FORMED, output_format=Trip)
    trip = answer.parsed_output
    check_trip(trip.city, trip.days, trip.sunny)


def stop_sequences():
    stop = ASKED["text"][3]
    answer = client.messages.create(**ALWAYS, thinking=DISABLED, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == ASKED["text"][: ASKED["text"].index(stop)]


def refusals():
    for fields, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"mcp_servers": [{}]}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**ALWAYS | {"extra_body": fields})
        except kind as error:
            assert error.body["type"] == "error"
            assert next(iter(fields)) in error.body["error"]["message"]
        else:
            raise AssertionError(fields)


run(
    {
        "message": message,
        "stream": stream,
        "raw events": raw_events,
        "thinking": thinking,
        "tools": tools,
        "structured output": structured,
        "stop sequences": stop_sequences,
        "refusals": refusals,
    }
)
