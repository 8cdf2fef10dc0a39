"""The official client."""

import json
from typing import Literal

from cases import (
    ASKED,
    CITIES,
    DESCRIPTION,
    DRAWN,
    PROMPT,
    THINKING,
    TOKENS,
    check_trip,
    check_weather,
    run,
)
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

client = OpenAI(base_url=ASKED["url"], api_key="none", max_retries=0)
USER = {"role": "user", "content": PROMPT}
ALWAYS = {"model": ASKED["model"], "temperature": 0, "messages": [USER]}
FORMED = ALWAYS | DRAWN


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    sunny: bool


class GetWeather(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


TOOL = pydantic_function_tool(GetWeather, name="get_weather", description=DESCRIPTION)


def chat():
    answer = client.chat.completions.create(**ALWAYS, max_tokens=TOKENS)
    assert answer.choices[0].message.content == ASKED["text"]
    assert answer.usage.completion_tokens == TOKENS


def stream():
    parts, usage = [], None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        **ALWAYS, max_tokens=TOKENS, stream=True, stream_options=options
    ):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == ASKED["text"]
    assert usage.completion_tokens == TOKENS


def structured():
    answer = client.chat.completions.parse(**FORMED, response_format=Trip)
    trip = answer.choices[0].message.parsed
    check_trip(trip.city, trip.days, trip.sunny)


def streamed_structure():
    with client.chat.completions.stream(**FORMED, response_format=Trip) as events:
        for _ in events:
            pass
        trip = events.get_final_completion().choices[0].message.parsed
    check_trip(trip.city, trip.days, trip.sunny)


def reasoning():
    answer = client.chat.completions.create(**ALWAYS, max_tokens=24, extra_body=THINKING)
    message = answer.choices[0].message
    assert message.reasoning_content == ASKED["reasoning"]
    assert message.content == ASKED["after"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


def streamed_reasoning():
    found = {"reasoning_content": "", "content": ""}
    for chunk in client.chat.completions.create(
        **ALWAYS, max_tokens=24, extra_body=THINKING, stream=True
    ):
        for name in found:
            found[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert found == {"reasoning_content": ASKED["reasoning"], "content": ASKED["after"]}


def tools():
    first = client.chat.completions.create(**FORMED, tools=[TOOL], tool_choice="required")
    message = first.choices[0].message
    assert message.content is None
    results = []
    for call in message.tool_calls:
        assert call.function.name == "get_weather"
        check_weather(json.loads(call.function.arguments))
        results.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    assert results
    more = FORMED | {"messages": [USER, message, *results]}
    then = client.chat.completions.create(
        **more, tools=[TOOL], tool_choice="none", max_tokens=TOKENS
    )
    assert then.usage.prompt_tokens > first.usage.prompt_tokens
    assert then.choices[0].message.content


def streamed_tools():
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(**FORMED, tools=[TOOL], tool_choice=named)
    calls = {}
    for chunk in client.chat.completions.create(
        **FORMED, tools=[TOOL], tool_choice=named, stream=True
    ):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (
                name + (piece.function.name or ""),
                arguments + (piece.function.arguments or ""),
            )
    wanted = [(c.function.name, c.function.arguments) for c in whole.choices[0].message.tool_calls]
    assert list(calls.values()) == wanted
    assert {name for name, _ in wanted} == {"get_weather"}
    assert all(json.loads(arguments)["city"] in CITIES for _, arguments in wanted)


def helper_for_streams():
    """Its own assembly of streamed calls, which validates them."""
    with client.chat.completions.stream(**FORMED, tools=[TOOL], tool_choice="required") as events:
        for _ in events:
            pass
        message = events.get_final_completion().choices[0].message
    for call in message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)


ITEMS = {"model": ASKED["model"], "input": PROMPT}
SEEDED = {"temperature": DRAWN["temperature"], "extra_body": {"seed": DRAWN["seed"]}}


def responses():
    whole = client.responses.create(**ITEMS, temperature=0, max_output_tokens=TOKENS)
    assert whole.output_text == ASKED["text"]
    assert whole.usage.output_tokens == TOKENS
    text = ""
    for event in client.responses.create(
        **ITEMS, temperature=0, max_output_tokens=TOKENS, stream=True
    ):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == ASKED["text"]


def parsed_responses():
    trip = client.responses.parse(**ITEMS, **SEEDED, text_format=Trip).output_parsed
    check_trip(trip.city, trip.days, trip.sunny)
    with client.responses.stream(**ITEMS, **SEEDED, text_format=Trip) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == trip


def responses_with_tools():
    tool = {"type": "function", **TOOL["function"]}
    first = client.responses.create(**ITEMS, **SEEDED, tools=[tool], tool_choice="required")
    results = []
    for call in first.output:
        check_weather(json.loads(call.arguments))
        results.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert results
    turn = {"input": [{"role": "user", "content": PROMPT}, *first.output, *results]}
    then = client.responses.create(**ITEMS | turn, temperature=0, max_output_tokens=TOKENS)
    assert then.usage.input_tokens > first.usage.input_tokens


def responses_with_reasoning():
    answer = client.responses.create(
        **ITEMS, temperature=0, max_output_tokens=24, extra_body=THINKING
    )
    assert answer.output[0].content[0].text == ASKED["reasoning"]
    assert answer.output_text == ASKED["after"]
    assert answer.usage.output_tokens_details.reasoning_tokens == 8


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "streamed structure": streamed_structure,
        "reasoning": reasoning,
        "streamed reasoning": streamed_reasoning,
        "tools": tools,
        "streamed tools": streamed_tools,
        "streamed and parsed tools": helper_for_streams,
        "responses": responses,
        "parsed responses": parsed_responses,
        "responses with tools": responses_with_tools,
        "responses with reasoning": responses_with_reasoning,
    }
)
