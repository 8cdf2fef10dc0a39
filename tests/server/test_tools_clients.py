"""Tools through OpenAI's own client, over sockets, from a server in processes of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from offered_tools import calling_tokenizer
from servers import serving

Tiny = Callable[..., Path]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


class Look(BaseModel):
    """As the client's helpers make a strict tool of it."""

    model_config = ConfigDict(extra="forbid")
    days: int = Field(ge=0, le=9)
    now: bool


LOOK: Any = openai.pydantic_function_tool(Look)


@pytest.fixture(scope="module")
def client(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    directory = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(tiny("deepseek_v3", keys={"vocab_size": 300}), directory)
    calling_tokenizer(directory, "kimi_k2")
    flags = ("--tool-call-parser", "kimi-k2", "--max-model-len", "2048")
    with serving(directory, *flags) as served:
        yield served.client()


def asked(client: OpenAI, **more: Any) -> dict[str, Any]:
    model = client.models.list().data[0].id
    return {"model": model, "messages": MESSAGES, "tools": [LOOK], "tool_choice": "required",
            "max_tokens": 700, "extra_body": OFF, "parallel_tool_calls": False} | more  # fmt: skip


def test_whole_and_streamed(client: OpenAI) -> None:
    for seed in range(2):
        fields = asked(client, seed=seed, temperature=1)
        whole = client.chat.completions.create(**fields).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "Look"
        assert call.id.startswith("functions.Look:")
        jsonschema.validate(json.loads(call.function.arguments), Look.model_json_schema())
        with client.chat.completions.stream(**fields) as stream:
            kinds = {event.type for event in stream}
            found = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds
        (parsed,) = found.message.tool_calls or ()
        assert parsed.function.arguments == call.function.arguments
        assert isinstance(parsed.function.parsed_arguments, Look)
        assert found.finish_reason == "tool_calls"


def test_calls_go_back_with_their_results(client: OpenAI) -> None:
    first = client.chat.completions.create(**asked(client)).choices[0].message
    (call,) = first.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    more = asked(client, messages=[*MESSAGES, first, result], tool_choice="none", max_tokens=5)
    again = client.chat.completions.create(**more)
    assert again.choices[0].message.tool_calls is None
    assert again.usage is not None


def test_responses(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    ways: Any = {"model": model, "input": "hi", "max_output_tokens": 12,
                 "extra_body": OFF | {"seed": 1}}  # fmt: skip
    whole = client.responses.create(**ways)
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    text, kinds = "", []
    for event in client.responses.create(**ways, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")


def test_responses_that_are_parsed(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    ways: Any = {"model": model, "input": "hi", "max_output_tokens": 700, "temperature": 1,
                 "extra_body": OFF | {"seed": 1}}  # fmt: skip
    parsed = client.responses.parse(**ways, text_format=Look)
    assert isinstance(parsed.output_parsed, Look)
    with client.responses.stream(**ways, text_format=Look) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    tool: Any = {"type": "function", "strict": True, **LOOK["function"]}
    calling = ways | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**calling) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert {f"response.function_call_arguments.{end}" for end in ("delta", "done")} <= kinds
    assert call.type == "function_call"
    jsonschema.validate(call.parsed_arguments, Look.model_json_schema())
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    ways["input"] = [{"role": "user", "content": "hi"}, call, result]
    assert client.responses.create(**ways | {"max_output_tokens": 4}).usage is not None


def test_a_schema_that_cannot_be_held_to(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(client, tools=[tool]))
    assert caught.value.param == "tools[0].function.parameters.properties.a.not"
