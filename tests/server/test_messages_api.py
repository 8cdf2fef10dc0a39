"""/v1/messages without an engine: what a request is read as, and how an answer is told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from answered import Answered
from chat_answers import Call, write_calls
from message_events import joined_message
from offered_tools import LIMITS, WEATHER, calling_tokenizer
from trueline.server.protocol import ApiError, read_chat
from trueline.server.protocol.messages_api.request import MessagesRequest, read_messages
from trueline.server.protocol.messages_api.writer import MessagesWriter
from trueline.text.formats.choose import CALLS
from trueline.text.tokenizer import Tokenizer

TOOLS = [
    {"name": "get_weather", "input_schema": WEATHER, "description": "d"},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ROME, NOW = Call("get_weather", {"city": 'Rome "x" é', "days": 3}), Call("now", {})
USER = {"role": "user", "content": "hi"}
DISABLED, ENABLED = {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}
USE = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "noon"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | more


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("messengers")
    return {syntax: calling_tokenizer(directory / syntax, syntax) for syntax in CALLS}


def answered(tokenizer: Tokenizer, syntax: str, **fields: Any) -> Answered:
    def write(asked: MessagesRequest, tokenizer: Tokenizer) -> MessagesWriter:
        return MessagesWriter("msg_0", asked)

    defaults = {"messages": [USER], "tools": TOOLS, "max_tokens": 1000}
    return Answered(tokenizer, syntax, read_messages, write, LIMITS, **defaults | fields)


def read(**fields: Any) -> MessagesRequest:
    body = {"messages": [USER], "max_tokens": 9} | fields
    return read_messages(json.dumps({k: v for k, v in body.items() if v != ...}).encode(), LIMITS)


# -- what is asked ----------------------------------------------------------------------


def test_blocks_are_the_messages_of_a_chat() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    found = read(
        system=[text("You"), text("are", **cached)],
        messages=[
            {"role": "user", "content": [text("1"), text("2")]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""}, text("Let "), USE,
                text("me"), USE | {"id": "b", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                RESULT | {"tool_use_id": "b", "content": [text("3"), text("4")]},
                RESULT | {"is_error": True} | cached, text("so"), text("?"),
                RESULT | {"content": None}]},
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": [USE | {"id": "c"}]},
            {"role": "user", "content": [RESULT | {"tool_use_id": "c"}]},
        ],
    ).conversation  # fmt: skip
    calls = [{"id": name, "type": "function", "function": {"name": called, "arguments": given}}
             for name, called, given in (("a", "now", {}), ("b", "f", {"x": 1}))]  # fmt: skip
    assert found.messages == [
        {"role": "system", "content": "You\nare"},
        {"role": "user", "content": "1\n2"},
        {"role": "assistant", "content": "Let me", "reasoning_content": "Hm.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "name": "f", "content": "3\n4"},
        {"role": "tool", "tool_call_id": "a", "name": "now", "content": "Error: noon"},
        {"role": "user", "content": "so\n?"},
        {"role": "tool", "tool_call_id": "a", "name": "now", "content": ""},
        {"role": "system", "content": "late"},
        {"role": "assistant", "content": None, "tool_calls": [calls[0] | {"id": "c"}]},
        {"role": "tool", "tool_call_id": "c", "name": "now", "content": "noon"},
    ]  # fmt: skip
    assert (found.add_generation_prompt, found.continue_final_message) == (True, False)
    begun = read(messages=[USER, {"role": "assistant", "content": "The"}]).conversation
    assert (begun.add_generation_prompt, begun.continue_final_message) == (False, True)


def test_what_a_chat_would_have() -> None:
    schema = {"type": "json_schema", "schema": {"type": "integer"}}
    asked = read(
        max_tokens=7, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["a", "b"], seed=4,
        stream=True, output_config={"effort": "none", "format": schema}, thinking=ENABLED,
        priority=2, cache_salt="s", metadata={"user_id": "u"}, service_tier="auto", container=None,
    )  # fmt: skip
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.25, 3)
    assert (params.stop, params.seed, params.n) == (("a", "b"), 4, 1)
    assert (asked.thinking_budget, asked.priority, asked.cache_salt) == (1024, 2, "s")
    assert (asked.stream, asked.answer_length) == (True, {"max_tokens": 7})
    assert (asked.conversation.reasoning_effort, asked.conversation.thinking) == ("none", True)
    assert asked.form is not None
    assert asked.form.params.json == {"type": "integer"}
    assert read(thinking={"type": "adaptive"}).thinking_budget is None
    assert read(thinking=DISABLED).conversation.thinking is False
    assert read().conversation.thinking is None


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "now"}, ("required", "now", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_choices(choice: Any, found: tuple[str, str | None, bool]) -> None:
    tools = read(tools=TOOLS, tool_choice=choice).conversation.tools
    assert tools is not None
    assert (tools.choice, tools.named, tools.parallel) == found


def test_tools_are_those_of_a_chat() -> None:
    """Templates show the same."""
    ours = read(tools=TOOLS[:1]).conversation.tools
    function = {"name": "get_weather", "description": "d", "parameters": WEATHER}
    body = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    theirs = read_chat(json.dumps(body).encode(), LIMITS).conversation.tools
    assert ours is not None
    assert theirs is not None
    assert json.dumps(ours.shown) == json.dumps(theirs.shown)
    assert [each.where for each in ours.functions] == ["tools[0].input_schema"]


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [*blocks]}]}


PLACE = "messages[1].content[0]"
REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": ...}, "max_tokens", "is missing; accepted: a whole number from 1 up"),
    ({"max_tokens": 0}, "max_tokens", "from 1 up"),
    ({"max_tokens": 8192}, "max_tokens", "8191"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "found a text"),
    ({"messages": [USER] * 4097}, "messages", "found 4097 entries"),
    ({"messages": [{"role": "user", "content": []}]}, "messages", "that say something"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [USER | {"name": "x"}]}, "messages[0].name", "is not known"),
    (said({"type": "image", "source": {}}), f"{PLACE}.type", "'image'; accepted: text, tool_re"),
    (said({"type": "document"}), f"{PLACE}.type", "'document'"),
    (said(USE), f"{PLACE}.type", "'tool_use'; accepted: text, tool_result"),
    (said(RESULT, role="assistant"), f"{PLACE}.type", "accepted: text, thinking, tool_use"),
    (said({"type": "redacted_thinking", "data": "x"}, role="assistant"), f"{PLACE}.type", "thi"),
    (said(USE | {"input": "{}"}, role="assistant"), f"{PLACE}.input", "found a text"),
    (said(USE, USE, role="assistant"), "messages[1].content[1].id", "another tool_use has it"),
    (said(USE, role="assistant"), "messages", "accepted: a tool_result after it"),
    (said(RESULT), f"{PLACE}.tool_use_id", "the id of a tool_use in a message before it"),
    (said(RESULT | {"content": [{"type": "image"}]}), PLACE, "image"),
    (said(text("x", speed=1)), f"{PLACE}.speed", "is not known"),
    ({"system": [{"type": "image"}]}, "system[0].type", "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].", "web_sea"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is missing"),
    ({"tools": [TOOLS[0] | {"name": "a b"}]}, "tools[0].name", "letters, digits"),
    ({"tools": TOOLS * 2}, "tools", "tools[2].name = 'get_weather': another"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "with tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name", "now"),
    ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type", "required"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is missing"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "omitted"),
    ({"stop_sequences": "x"}, "stop_sequences", "a list of up to 64"),
    ({"stop_sequences": ["x" * 257]}, "stop_sequences", "257 characters"),
    ({"stop": ["x"]}, "stop", "is not known"),
    ({"mcp_servers": [{}]}, "mcp_servers", "not offered"),
    ({"container": "c"}, "container", "not offered"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format", "json_obj"),
    ({"tools": TOOLS, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
     "output_config.format", "without tools"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "as a field"),
    ({"model": "claude"}, "model", "not served here"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), REFUSALS)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert says in caught.value.message


# -- how it is answered -----------------------------------------------------------------

WORDS = st.sampled_from(["Hm", "é", " ", "\n", "<", "</", "a.", "```"])


@given(data=st.data())
def test_a_stream_is_the_whole(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    """However it is cut: thinking, text, calls, text, and calls that break off."""
    syntax = data.draw(st.sampled_from(sorted(CALLS)))
    tokenizer, thinks = tokenizers[syntax], data.draw(st.booleans())
    words = "".join(data.draw(st.lists(WORDS, max_size=4)))
    if thinks:
        words += "</think>" + "".join(data.draw(st.lists(WORDS, max_size=4)))
    for calls in data.draw(st.lists(st.sampled_from([[ROME], [NOW, ROME]]), max_size=2)):
        words += write_calls(syntax, calls) + "".join(data.draw(st.lists(WORDS, max_size=3)))
    ids = tokenizer.encode(words, add_special_tokens=False)
    ids = ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8))), len(ids)]
    given = answered(tokenizer, syntax, thinking=ENABLED if thinks else DISABLED)
    end = data.draw(st.sampled_from(["stop", "length"]))
    events, whole = given.tell([ids[a:b] for a, b in pairwise(bounds)], end)
    assert joined_message(events) == whole


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_blocks_come_in_order(tokenizers: dict[str, Tokenizer], syntax: str) -> None:
    given = answered(tokenizers[syntax], syntax, thinking=ENABLED)
    whole = given.told("Hm.</think>Well." + write_calls(syntax, [ROME, NOW]))
    thought, spoken, rome, now = whole["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (spoken["type"], spoken["text"]) == ("text", "Well.")
    assert (rome["type"], rome["name"], rome["input"]) == ("tool_use", ROME.name, ROME.arguments)
    assert (now["name"], now["input"]) == ("now", {})
    assert rome["id"] != now["id"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    usage = whole["usage"]
    assert usage["input_tokens"] == len(given.ids)
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}


def test_why_it_ended(tokenizers: dict[str, Tokenizer]) -> None:
    given = answered(tokenizers["kimi_k2"], "kimi_k2", thinking=DISABLED, stop_sequences=["stop"])
    for told, end, reason, sequence in (
        ("Well", "stop", "end_turn", None),
        ("Well", "length", "max_tokens", None),
        ("Well stop it", "stop", "stop_sequence", "stop"),
        (write_calls("kimi_k2", [NOW]), "length", "max_tokens", None),
    ):
        whole = given.told(told, end)
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    cut = write_calls("kimi_k2", [NOW, ROME])
    whole = given.told(cut[: cut.index("Rome")], "length")
    now, spoken = whole["content"]
    assert now["name"] == "now"
    (broken,) = whole["malformed_tool_calls"]
    assert (broken["index"], broken["text"]) == (1, spoken["text"])


def test_an_answer_that_was_begun(tokenizers: dict[str, Tokenizer]) -> None:
    """It goes on where the last message ends."""
    begun = [USER, {"role": "assistant", "content": "The capital"}]
    given = answered(tokenizers["glm47"], "glm47", messages=begun)
    assert given.prompt is not None
    assert given.prompt.endswith("The capital")
    assert given.told(" is").get("content")[0]["text"] == " is"


def test_thinking_is_what_the_prompt_makes_of_it(tokenizers: dict[str, Tokenizer]) -> None:
    for thinking, end in ((ENABLED, "<think>"), ({"type": "adaptive"}, "<think>"),
                          (DISABLED, "</think>"), (None, "<think>")):  # fmt: skip
        given = answered(tokenizers["glm47"], "glm47", thinking=thinking)
        assert given.prompt is not None
        assert given.prompt.endswith(end)


def test_a_template_without_a_switch(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    always = calling_tokenizer(tmp_path / "a", "glm47", template=template + "<think>")
    never = calling_tokenizer(tmp_path / "b", "glm47", template=template + "</think>")
    for tokenizer, accepted, other in ((always, ENABLED, DISABLED), (never, DISABLED, ENABLED)):
        answered(tokenizer, "glm47", thinking=accepted, tools=None)
        with pytest.raises(ApiError) as caught:
            answered(tokenizer, "glm47", thinking=other, tools=None)
        assert caught.value.param == "thinking.type"
