"""/v1/messages from HTTP to an engine and back, in this process; endpoints that are not here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from answered import named_events
from inside import Inside
from message_events import joined_message
from offered_tools import calling_tokenizer
from trueline.server.protocol.not_offered import REFUSED

Tiny = Callable[..., Path]
SCHEMA = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}},
          "required": ["days"], "additionalProperties": False}  # fmt: skip
LOOK = {"name": "look", "input_schema": SCHEMA}
USER = {"role": "user", "content": "hi"}
DISABLED = {"thinking": {"type": "disabled"}}
KEY = {"x-api-key": "secret"}


@pytest.fixture(scope="module")
def inside(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    directory = tmp_path_factory.mktemp("messenger") / "model"
    shutil.copytree(tiny("deepseek_v3", keys={"vocab_size": 300}), directory)
    calling_tokenizer(directory, "glm47")
    return Inside(
        directory, tool_call_parser="glm47", max_model_len=2048, max_num_seqs=4, keys=("secret",)
    )


def ask(inside: Inside, **fields: Any) -> dict[str, Any]:
    """The same, whole and streamed, but for ids and what was in the cache."""
    asked = {"messages": [USER], "max_tokens": 24, "seed": 1, "temperature": 1} | fields
    heard = inside.ask("/v1/messages", asked, headers=KEY)
    assert heard.status == 200, heard.body
    whole: dict[str, Any] = json.loads(heard.body)
    streamed = inside.ask("/v1/messages", asked | {"stream": True}, headers=KEY)
    told = joined_message(named_events(streamed.body))
    for message in (whole, told):
        usage = message["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert told == whole
    return whole


def test_whole_and_streamed(inside: Inside) -> None:
    (said,) = ask(inside, **DISABLED)["content"]
    chat = inside.ask("/v1/chat/completions", {
        "messages": [USER], "max_tokens": 24, "seed": 1, "temperature": 1,
        "chat_template_kwargs": {"enable_thinking": False}}, headers=KEY)  # fmt: skip
    (choice,) = json.loads(chat.body)["choices"]
    assert said["text"] == choice["message"]["content"]
    thought = ask(inside, thinking={"type": "enabled", "budget_tokens": 6})
    assert [block["type"] for block in thought["content"][:2]] == ["thinking", "text"]
    assert thought["stop_reason"] == "max_tokens"


def test_calls_and_forms_are_held_to(inside: Inside) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        once = choice | {"disable_parallel_tool_use": True}
        whole = ask(inside, tools=[LOOK], tool_choice=once, max_tokens=700, **DISABLED)
        assert whole["stop_reason"] == "tool_use"
        (call,) = whole["content"]
        assert (call["type"], call["name"]) == ("tool_use", "look")
        jsonschema.validate(call["input"], SCHEMA)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    (said,) = ask(inside, output_config=form, max_tokens=700, **DISABLED)["content"]
    jsonschema.validate(json.loads(said["text"]), SCHEMA)


def test_an_answer_goes_back_with_its_result(inside: Inside) -> None:
    asked = {"messages": [USER], "tools": [LOOK], "seed": 1, "temperature": 1, "max_tokens": 700,
             "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
             "thinking": {"type": "enabled", "budget_tokens": 4}}  # fmt: skip
    first = json.loads(inside.ask("/v1/messages", asked, headers=KEY).body)
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "rain"}
    more = {"messages": [USER, {"role": "assistant", "content": first["content"]},
                         {"role": "user", "content": [result]}], "tools": [LOOK]}  # fmt: skip
    then = inside.ask("/v1/messages", more | {"max_tokens": 4}, headers=KEY)
    assert then.status == 200, then.body
    counted = inside.ask("/v1/messages/count_tokens", more, headers=KEY)
    usage = json.loads(then.body)["usage"]
    assert json.loads(counted.body) == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }


@pytest.mark.parametrize(
    ("fields", "kind", "param", "says"),
    [
        ({"max_tokens": None}, "invalid_request_error", "max_tokens", "found null"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "invalid_request_error",
         "messages", "messages: 3005 tokens"),
        ({"output_config": {"effort": "high"}}, "invalid_request_error", "output_config.effort",
         "output_config.effort = 'high'"),
        ({"tools": [LOOK | {"strict": True, "input_schema": {"type": "string"}}]},
         "invalid_request_error", "tools[0].input_schema.type", "object"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
         "invalid_request_error", "output_config.format.schema.not", "not"),
        ({"model": "claude"}, "not_found_error", "model", "not served here"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(
    inside: Inside, fields: dict[str, Any], kind: str, param: str, says: str
) -> None:
    asked = {"messages": [USER], "max_tokens": 9} | fields
    heard = inside.ask("/v1/messages", asked, headers=KEY | {"x-request-id": "r"})
    told = json.loads(heard.body)
    assert (told["type"], told["request_id"]) == ("error", "r")
    assert (told["error"]["type"], told["error"]["param"]) == (kind, param)
    assert says in told["error"]["message"]


def test_errors_before_the_route(inside: Inside) -> None:
    asked = {"messages": [USER], "max_tokens": 9}
    heard = inside.ask("/v1/messages", asked, headers={"x-api-key": "other"})
    assert (heard.status, heard.error["type"]) == (401, "authentication_error")
    heard = inside.ask("/v1/messages", headers=KEY)
    assert (heard.status, json.loads(heard.body)["type"]) == (405, "error")
    heard = inside.ask("/v1/chat/completions", asked, headers={"x-api-key": "other"})
    assert json.loads(heard.body).keys() == {"error"}


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
    asked = {"messages": [USER], "max_tokens": 900, "stream": True, "ignore_eos": True}
    events = named_events(inside.ask("/v1/messages", asked | DISABLED, headers=KEY).body)
    assert [name for name, _ in events].count("error") == 1
    assert events[-1][0] == "error"


@pytest.mark.parametrize("route", REFUSED)
def test_endpoints_that_are_not_here(inside: Inside, route: str) -> None:
    path = route.replace("{rest:path}", "abc/def")
    for method in ("GET", "POST"):
        heard = inside.ask(path, {} if method == "POST" else None, headers=KEY)
        assert heard.status == 404
        assert heard.error["message"].startswith(f"{method} {path} is not offered: ")
        assert heard.error["code"] == "not_offered"
