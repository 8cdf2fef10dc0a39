"""Kimi-K2.5's tools as types of TypeScript; goldens/kimi_k25_tools.json says who made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import UsageError
from trueline.text.chat import render_chat
from trueline.text.kimi_tools import declare

GOLDENS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "goldens" / "kimi_k25_tools.json").read_text()
)["cases"]
TEMPLATE = "{{ tools_ts_str if tools_ts_str else (tools | tojson) }}"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", GOLDENS)
def test_declared(name: str) -> None:
    tools, wanted = GOLDENS[name]
    found = render_chat(TEMPLATE, HI, tools=tools)
    assert found == (wanted or json.dumps(tools, sort_keys=True, ensure_ascii=False))


def test_some_have_no_form() -> None:
    """The template then writes JSON, as with the model's own tokenizer."""
    without = {name for name, (_, wanted) in GOLDENS.items() if wanted is None}
    assert {"one of", "no type", "a reference to nothing", "a choice of two types"} < without
    assert "an unknown type" not in without


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f", "parameters": [1]},
        {"name": "f", "parameters": {"properties": {"a": "string"}}},
        {"name": "f", "parameters": {"properties": ["a"]}},
        {"name": "f", "parameters": {"properties": {"a": {"type": 3}}}},
        {"name": "f", "parameters": {"properties": {}, "required": None}},
        {"name": "f", "parameters": {"additionalProperties": "yes"}},
        {"name": "f", "parameters": {"$defs": {"A": True}}},
        {"name": "f", "description": 3},
        "f",
    ],
)
def test_what_is_no_schema_has_none(function: Any) -> None:
    assert declare([{"type": "function", "function": function}]) is None


def test_only_where_the_template_reads_it() -> None:
    tools = GOLDENS["two functions"][0]
    shown = "{{ tools | tojson }}{{ thinking is defined }}{# NAME #}"
    assert render_chat(shown, HI, tools=tools) == json.dumps(tools) + "False"
    # whoever reads it gets what the model's own tokenizer gives: keys in order, thinking
    sorted_tools = json.dumps(tools, sort_keys=True)
    assert (
        render_chat(shown.replace("NAME", "tools_ts_str"), HI, tools=tools) == sorted_tools + "True"
    )
    assert render_chat("{{ thinking }}{{ tools_ts_str is defined }}", HI) == "TrueFalse"
    thinks = "{{ thinking }}{# tools_ts_str #}"
    assert render_chat(thinks, HI, thinking=False) == "False"
    assert render_chat(TEMPLATE, HI, tools=tools, tools_ts_str="mine") == "mine"


def test_media_are_refused_by_name() -> None:
    for kind in ("image_url", "image", "video_url", "input_audio"):
        content = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "x"}}]
        with pytest.raises(UsageError) as caught:
            render_chat(TEMPLATE, [{"role": "user", "content": content}])
        assert str(caught.value) == (
            f"messages[0].content[1]: type '{kind}' is not supported; accepted: text"
        )
