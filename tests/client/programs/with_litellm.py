"""litellm, which speaks to a server of OpenAI's kind by name."""

import json

import litellm
from cases import (
    ASKED,
    DESCRIPTION,
    DRAWN,
    PROMPT,
    THINKING,
    TOKENS,
    check_trip,
    check_weather,
    run,
)

USER = {"role": "user", "content": PROMPT}
ALWAYS = {
    "model": f"openai/{ASKED['model']}",
    "api_base": ASKED["url"],
    "api_key": "none",
    "temperature": 0,
    "messages": [USER],
    "num_retries": 0,
}
FORMED = ALWAYS | DRAWN
PROPERTIES = {
    "city": {"type": "string", "enum": ["Rome", "Oslo"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
}


def schema(**more):
    properties = PROPERTIES | more
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": schema()},
}


def chat():
    answer = litellm.completion(**ALWAYS, max_tokens=TOKENS)
    assert answer.choices[0].message.content == ASKED["text"]


def stream():
    chunks = litellm.completion(**ALWAYS, max_tokens=TOKENS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ASKED["text"]


def structured():
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "trip",
            "strict": True,
            "schema": schema(sunny={"type": "boolean"}),
        },
    }
    answer = litellm.completion(**FORMED, response_format=form)
    check_trip(**json.loads(answer.choices[0].message.content))


def reasoning():
    answer = litellm.completion(**ALWAYS, max_tokens=24, extra_body=THINKING)
    message = answer.choices[0].message
    assert message.reasoning_content == ASKED["reasoning"]
    assert message.content == ASKED["after"]


def streamed_reasoning():
    chunks = litellm.completion(**ALWAYS, max_tokens=24, extra_body=THINKING, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    said = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert said == ASKED["reasoning"]
    assert "".join(delta.content or "" for delta in deltas) == ASKED["after"]


def tools():
    first = litellm.completion(**FORMED, tools=[TOOL], tool_choice="required")
    message = first.choices[0].message
    assert message.tool_calls
    results = []
    for call in message.tool_calls:
        assert call.function.name == "get_weather"
        check_weather(json.loads(call.function.arguments))
        results.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    more = FORMED | {"messages": [USER, message, *results]}
    then = litellm.completion(**more, tools=[TOOL], tool_choice="none", max_tokens=TOKENS)
    assert then.choices[0].message.content


def streamed_tools():
    named = {"type": "function", "function": {"name": "get_weather"}}
    chunks = list(litellm.completion(**FORMED, tools=[TOOL], tool_choice=named, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    for call in built.choices[0].message.tool_calls:
        assert call.function.name == "get_weather"
        check_weather(json.loads(call.function.arguments))


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "reasoning": reasoning,
        "streamed reasoning": streamed_reasoning,
        "tools": tools,
        "streamed tools": streamed_tools,
    }
)
