"""/v1/responses from HTTP to an engine and back, in this process. The model has no mind: what it
calls, a grammar makes it call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.responses import Response

from answered import named_events
from inside import Inside
from offered_tools import calling_tokenizer
from response_events import joined_response

Tiny = Callable[..., Path]
SCHEMA = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}},
          "required": ["days"], "additionalProperties": False}  # fmt: skip
LOOK = {"type": "function", "name": "look", "parameters": SCHEMA}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def inside(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    directory = tmp_path_factory.mktemp("responder") / "model"
    shutil.copytree(tiny("deepseek_v3", keys={"vocab_size": 300}), directory)
    calling_tokenizer(directory, "glm47")
    return Inside(directory, tool_call_parser="glm47", max_model_len=2048, max_num_seqs=4)


def ask(inside: Inside, **fields: Any) -> dict[str, Any]:
    """The same, whole and streamed, but for ids and times."""
    asked = {"input": "hi", "max_output_tokens": 24, "seed": 1, "temperature": 1} | fields
    heard = inside.ask("/v1/responses", asked)
    assert heard.status == 200, heard.body
    whole: dict[str, Any] = json.loads(heard.body)
    Response.model_validate(whole)
    streamed = inside.ask("/v1/responses", asked | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    told = joined_response(named_events(streamed.body))
    for response in (whole, told):
        del response["id"], response["created_at"], response["usage"]["input_tokens_details"]
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert told == whole
    return whole


def test_whole_and_streamed(inside: Inside) -> None:
    (said,) = ask(inside, **QUIET)["output"]
    chat = inside.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}],
                      "max_tokens": 24, "seed": 1, "temperature": 1} | QUIET)  # fmt: skip
    (choice,) = json.loads(chat.body)["choices"]
    assert said["content"][0]["text"] == choice["message"]["content"]
    thought = ask(inside, thinking_token_budget=6)
    assert [item["type"] for item in thought["output"][:2]] == ["reasoning", "message"]
    assert thought["usage"]["output_tokens_details"]["reasoning_tokens"] >= 6
    scored = ask(inside, include=[LOGPROBS], top_logprobs=2, **QUIET)
    scores = scored["output"][0]["content"][0]["logprobs"]
    assert {len(score["top_logprobs"]) for score in scores} == {2}
    assert scored["top_logprobs"] == 2


def test_calls_and_forms_are_held_to(inside: Inside) -> None:
    for choice in ("required", {"type": "function", "name": "look"}):
        whole = ask(inside, tools=[LOOK], tool_choice=choice, parallel_tool_calls=False,
                    max_output_tokens=700, **QUIET)  # fmt: skip
        assert whole["status"] == "completed"
        (call,) = whole["output"]
        assert (call["type"], call["name"]) == ("function_call", "look")
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    whole = ask(inside, text=form, thinking_token_budget=4, max_output_tokens=700)
    _, said = whole["output"]
    jsonschema.validate(json.loads(said["content"][0]["text"]), SCHEMA)


def test_an_answer_goes_back_as_input(inside: Inside) -> None:
    """Every item that the server gives is one that it takes."""
    first = inside.ask("/v1/responses", {
        "input": "hi", "tools": [LOOK], "tool_choice": "required", "seed": 1, "temperature": 1,
        "thinking_token_budget": 4, "parallel_tool_calls": False, "max_output_tokens": 700,
    })  # fmt: skip
    output = json.loads(first.body)["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "rain"}
    items = [{"role": "user", "content": "hi"}, *output, result]
    then = inside.ask("/v1/responses", {"input": items, "max_output_tokens": 4} | QUIET)
    assert then.status == 200, then.body
    said = json.loads(then.body)["output"]
    again = inside.ask("/v1/responses", {"input": [*items, *said], "max_output_tokens": 4})
    assert again.status == 200, again.body
    given, more = (json.loads(heard.body)["usage"]["input_tokens"] for heard in (then, again))
    assert more > given


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": "x" * 3000}, "input", "input: 3005 tokens"),
        ({"input": "x" * 2000, "max_output_tokens": 500}, "max_output_tokens", "has 20"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort = 'high': this"),
        ({"text": {"format": {"type": "json_schema", "name": "a",
                              "schema": {"type": "object", "uniqueItems": True}}}},
         "text.format.schema", "uniqueItems"),
        ({"tools": [LOOK | {"strict": True, "parameters": {"type": "string"}}]},
         "tools[0].parameters.type", "object"),
        ({"stop": ["x"] * 65}, "stop", "65"),
    ],
)  # fmt: skip
def test_errors_call_fields_as_the_request_does(
    inside: Inside, fields: dict[str, Any], param: str, says: str
) -> None:
    heard = inside.ask("/v1/responses", {"input": "hi"} | fields)
    assert heard.status == 400, heard.body
    assert heard.error["param"].startswith(param), heard.error
    assert says in heard.error["message"]


def test_a_client_that_leaves_ends_the_work(inside: Inside) -> None:
    asked = {"input": "hi", "stream": True, "max_output_tokens": 1500, "ignore_eos": True} | QUIET
    inside.ask("/v1/responses", asked, leaves_after=5)
    assert inside.steps_until_idle() < 5


def test_an_engine_that_fails_is_told_in_the_stream(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        if self.steps > before + 3:
            self._fail_streams("it broke")
        else:
            step(self)

    before, step = inside.engine.steps, type(inside.engine).step
    monkeypatch.setattr(type(inside.engine), "step", fails)
    heard = inside.ask("/v1/responses", {"input": "hi", "stream": True} | QUIET)
    events = named_events(heard.body)
    assert events[-1][0] == "response.failed"
    assert events[-1][1]["response"]["error"]["code"]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
