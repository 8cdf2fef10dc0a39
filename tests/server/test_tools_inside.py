"""Tools from HTTP to a model and back. The model has no mind: what it calls, a grammar makes it
call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chat_tokenizers import TEMPLATE
from inside import Inside
from offered_tools import TOOLS, USER, WEATHER, calling_tokenizer, joined, tool, without_broken
from trueline.text.formats.choose import CALLS

Tiny = Callable[..., Path]
VOCAB = 300
FLAT = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 9}, "now": {"type": "boolean"}},
        "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
OFFERED = [tool("get_weather", FLAT), tool("now", NOTHING)]
SCHEMAS = {"get_weather": FLAT, "now": NOTHING}


@pytest.fixture(scope="module")
def served(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Inside]:
    """A server of a model that writes calls so; made once."""
    made: dict[str, Inside] = {}

    def serve(syntax: str) -> Inside:
        if syntax not in made:
            directory = tmp_path_factory.mktemp(syntax) / "model"
            shutil.copytree(tiny("deepseek_v3", keys={"vocab_size": VOCAB}), directory)
            calling_tokenizer(directory, syntax)
            made[syntax] = Inside(
                directory, tool_call_parser=syntax, max_model_len=2048, max_num_seqs=4
            )
        return made[syntax]

    return serve


def ask(inside: Inside, **fields: Any) -> dict[str, Any]:
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = {"messages": [USER], "max_tokens": 700, "tools": OFFERED, "temperature": 1}
    heard = inside.ask("/v1/chat/completions", asked | switch | fields)
    assert heard.status == 200, heard.body
    if not fields.get("stream"):
        found: dict[str, Any] = json.loads(heard.body)
        return found
    chunks = [json.loads(each[6:]) for each in heard.body.split(b"\n\n") if b"{" in each]
    message, reason = joined(chunks)
    return {"choices": [{"message": without_broken(message), "finish_reason": reason}]}


def check(choice: dict[str, Any]) -> bool:
    """Whether it came to its end: then it is calls, all of them in order."""
    message = choice["message"]
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
    if choice["finish_reason"] == "length":
        return False
    assert choice["finish_reason"] == "tool_calls"
    assert message["tool_calls"]
    assert not (message["content"] or "").strip()
    assert "malformed_tool_calls" not in message
    return True


@pytest.mark.parametrize("syntax", ["deepseek_v4", "glm45", "kimi_k2"])
def test_required_calls(served: Callable[[str], Inside], syntax: str) -> None:
    inside = served(syntax)
    ended = 0
    for seed in range(2):
        asked: dict[str, Any] = {"tool_choice": "required", "seed": seed}
        asked["parallel_tool_calls"] = seed > 0
        whole = ask(inside, **asked, n=2, logprobs=True)
        ended += sum(check(choice) for choice in whole["choices"])
        for choice in whole["choices"]:
            assert choice["logprobs"]["content"]
        streamed = ask(inside, **asked, stream=True)["choices"][0]
        # all but the ids that are made here
        told = [c["message"].get("tool_calls", []) for c in (streamed, whole["choices"][0])]
        first, second = [[c["function"] for c in calls] for calls in told]
        assert first == second
    assert ended


def test_one_function_once(served: Callable[[str], Inside]) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for syntax in ("hermes", "deepseek_v31"):
        found = ask(served(syntax), tool_choice=named, parallel_tool_calls=False)
        (choice,) = found["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "now"
        assert json.loads(call["function"]["arguments"]) == {}
        assert choice["finish_reason"] == "tool_calls"


def test_calls_follow_the_reasoning(served: Callable[[str], Inside]) -> None:
    """However long it is, and without the marks that would end it otherwise."""
    for syntax in ("kimi_k2", "glm47"):
        found = ask(
            served(syntax),
            tool_choice="required",
            thinking_token_budget=9,
            chat_template_kwargs={"enable_thinking": True},
        )
        (choice,) = found["choices"]
        check(choice)
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 9


def test_strict_functions_are_held_to_their_schema(served: Callable[[str], Inside]) -> None:
    """Where free text leaves a model no other word than the mark that opens a call."""
    inside = served("glm47")
    strict = [tool("get_weather", FLAT, strict=True), tool("now", NOTHING, strict=True)]
    opens = inside.tokenizer.vocabulary.token_id("<tool_call>")
    for seed in range(3):
        found = ask(inside, tools=strict, logit_bias={str(opens): 100}, seed=seed)
        check(found["choices"][0])
        assert found["choices"][0]["message"].get("tool_calls")


def test_refusals(served: Callable[[str], Inside]) -> None:
    for fields, param in (
        ({"tools": [tool("f", {"properties": {"a": {"uniqueItems": True}}})],
          "tool_choice": "required"}, "tools[0].function.parameters.properties.a.uniqueItems"),
        ({"tools": [tool("f", {"type": "string"}, strict=True)]},
         "tools[0].function.parameters.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):  # fmt: skip
        heard = served("kimi_k2").ask("/v1/chat/completions",
                                      {"messages": [USER], "tools": TOOLS} | fields)  # fmt: skip
        assert heard.status == 400, heard.body
        assert heard.error["param"] == param


def test_tokens_of_messages_with_tools(served: Callable[[str], Inside]) -> None:
    inside = served("glm47")
    heard = inside.ask("/tokenize", {"messages": [USER], "tools": TOOLS, "tool_choice": "auto"})
    ids = json.loads(heard.body)["tokens"]
    text = inside.tokenizer.decode(ids, skip_special_tokens=False)
    assert json.dumps(WEATHER) in text
    heard = inside.ask("/tokenize", {"messages": [USER], "tools": TOOLS, "tool_choice": "none"})
    assert len(json.loads(heard.body)["tokens"]) < len(ids) - len(json.dumps(WEATHER))
    assert "tools" in TEMPLATE


@pytest.mark.slow
@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_many_required_calls(served: Callable[[str], Inside], syntax: str) -> None:
    inside = served(syntax)
    ended = 0
    for seed in range(30):
        found = ask(inside, tool_choice="required", n=4, seed=seed)
        ended += sum(check(choice) for choice in found["choices"])
    assert ended > 5
