"""/v1/responses without an engine: what a request is read as, and how an answer is told."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from answered import Answered
from chat_answers import Call, write_calls
from offered_tools import LIMITS, WEATHER, calling_tokenizer
from response_events import joined_response
from trueline.server.protocol import ApiError, read_chat
from trueline.server.protocol.responses_api.request import ResponsesRequest, read_responses
from trueline.server.protocol.responses_api.writer import ResponsesWriter
from trueline.text.formats.choose import CALLS
from trueline.text.tokenizer import Tokenizer

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False},
    {"type": "function", "name": "now"},
]
ROME, NOW = Call("get_weather", {"city": 'Rome "x" é', "days": 3}), Call("now", {})
LOGPROBS = "message.output_text.logprobs"
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "noon"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("responders")
    return {syntax: calling_tokenizer(directory / syntax, syntax) for syntax in CALLS}


def answered(tokenizer: Tokenizer, syntax: str, **fields: Any) -> Answered:
    def write(asked: ResponsesRequest, tokenizer: Tokenizer) -> ResponsesWriter:
        return ResponsesWriter("resp_0", 0, asked, tokenizer)

    defaults = {"input": "hi", "tools": TOOLS, "max_output_tokens": 1000}
    return Answered(tokenizer, syntax, read_responses, write, LIMITS, **defaults | fields)


def without_ids(output: list[dict[str, Any]]) -> str:
    """Without those that are made as an answer is read."""
    return re.sub("call_[0-9a-f]{24}", "", json.dumps(output))


def read(**fields: Any) -> ResponsesRequest:
    return read_responses(json.dumps({"input": "hi"} | fields).encode(), LIMITS)


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return read(input=items, **fields).conversation.messages


# -- what is asked ----------------------------------------------------------------------


def test_items_are_the_messages_of_a_chat() -> None:
    assert read(input="hi").conversation.messages == [USER]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
               "content": [{"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Let", "annotations": [], "logprobs": []},
                        {"type": "refusal", "refusal": "me"}]}  # fmt: skip
    more = {"role": "assistant", "content": " see."}
    second = CALL | {"call_id": "b", "name": "f", "id": "fc_1", "status": "completed"}
    parts = [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]
    then = {"type": "message", "role": "user", "content": parts}
    found = messages(
        {"role": "developer", "content": "be"}, {"role": "system", "content": "it"}, USER,
        thought, said, CALL, more, second, RESULT | {"call_id": "b", "output": parts}, RESULT,
        then, {"role": "developer", "content": "late"}, {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"}, thought,
        instructions="You",
    )  # fmt: skip
    calls = [{"id": name, "type": "function", "function": {"name": called, "arguments": "{}"}}
             for name, called in (("a", "now"), ("b", "f"))]  # fmt: skip
    assert found == [
        {"role": "system", "content": "You\n\nbe\n\nit"},
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Let\nme see.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "name": "f", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "a", "name": "now", "content": "noon"},
        {"role": "user", "content": "1\n2"},
        {"role": "system", "content": "late"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": ""},
    ]  # fmt: skip
    assert messages(CALL, RESULT)[0]["content"] is None


def test_what_a_chat_would_have() -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}, "strict": True}
    asked = read(
        max_output_tokens=7, temperature=0.5, top_p=0.25, top_logprobs=3, include=[LOGPROBS],
        reasoning={"effort": "none", "summary": "auto"}, text={"format": schema}, seed=4,
        thinking_token_budget=9, priority=2, cache_salt="s", stream=True, truncate_prompt_tokens=5,
        tools=TOOLS, tool_choice="none", parallel_tool_calls=False,
        chat_template_kwargs={"a": 1}, metadata={"a": "b"}, user="u", store=False,
        truncation="disabled", background=False, previous_response_id=None,
        stream_options={"include_obfuscation": False},
    )  # fmt: skip
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.25)
    assert (params.logprobs, asked.logprobs, params.seed, params.n) == (3, 3, 4, 1)
    assert (asked.thinking_budget, asked.priority, asked.cache_salt) == (9, 2, "s")
    assert (asked.stream, asked.truncate_prompt_tokens) == (True, 5)
    assert asked.answer_length == {"max_output_tokens": 7}
    assert asked.conversation.reasoning_effort == "none"
    assert asked.conversation.chat_template_kwargs == {"a": 1}
    assert asked.form is not None
    assert asked.form.params.json == {"type": "integer"}
    assert asked.form.names == {"json": "text.format.schema"}
    tools = asked.conversation.tools
    assert tools is not None
    assert (tools.choice, tools.parallel) == ("none", False)
    assert read(include=[LOGPROBS]).logprobs == 0
    assert read(include=["reasoning.encrypted_content"]).logprobs is None


def test_tools_are_those_of_a_chat() -> None:
    """Templates show the same."""
    flat = {"type": "function", "name": "f", "description": "d", "parameters": WEATHER}
    nested = {"type": "function", "function": {n: flat[n] for n in flat if n != "type"}}
    choice = {"type": "function", "name": "f"}
    ours = read(tools=[flat], tool_choice=choice).conversation.tools
    body = {"messages": [USER], "tools": [nested], "parallel_tool_calls": None,
            "tool_choice": {"type": "function", "function": {"name": "f"}}}  # fmt: skip
    theirs = read_chat(json.dumps(body).encode(), LIMITS).conversation.tools
    assert ours is not None
    assert theirs is not None
    assert json.dumps(ours.shown) == json.dumps(theirs.shown)
    assert (ours.choice, ours.named) == (theirs.choice, theirs.named) == ("required", "f")
    assert [each.where for each in ours.functions] == ["tools[0].parameters"]
    strict = read(tools=[flat | {"strict": True}]).conversation.tools
    assert strict is not None
    assert strict.functions[0].strict


PART = {"type": "input_text", "text": "a"}
REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input", "a text that is not empty"),
    ({"input": []}, "input", "at least one item"),
    ({"input": 3}, "input", "found a whole number"),
    ({"input": [3]}, "input[0]", "found a whole number"),
    ({"input": [USER] * 4097}, "input", "found 4097 entries; accepted: a text"),
    ({"input": [{"type": "reasoning"}]}, "input", "items that say something"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "accepted: message, function_call"),
    ({"input": [USER, {"type": ["message"]}]}, "input[1].type", "accepted: message"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "nothing is kept"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    ({"input": [USER | {"role": "critic"}]}, "input[0].role", "'critic'"),
    ({"input": [USER | {"content": None}]}, "input[0].content", "found null; accepted: a text or"),
    ({"input": [USER | {"name": "x"}]}, "input[0].name", "is not known"),
    ({"input": [USER | {"content": [PART, {"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[1].type", "'input_image'; accepted: input_text, output_text, refusal"),
    ({"input": [USER | {"content": [{"type": "input_file", "file_id": "x"}]}]},
     "input[0].content[0].type", "'input_file'"),
    ({"input": [USER | {"content": [{"type": "input_audio"}]}]},
     "input[0].content[0].type", "'input_audio'"),
    ({"input": [USER | {"content": [PART | {"detail": 1}]}]}, "input[0].content[0].detail", "not"),
    ({"input": [RESULT]}, "input[0].call_id", "'a': accepted: the call_id of a function_call"),
    ({"input": [USER, RESULT]}, "input[1].call_id", "'a': accepted"),
    ({"input": [RESULT, CALL]}, "input[0].call_id", "before it"),
    ({"input": [CALL, CALL]}, "input[1].call_id", "another call has it"),
    ({"input": [CALL | {"arguments": "{"}]}, "input[0].arguments", "a JSON object"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments", "found an object"),
    ({"input": [CALL, RESULT | {"output": [{"type": "input_image"}]}]},
     "input[1].output[0].type", "accepted: input_text"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]},
     "input[0].encrypted_content", "accepted: null"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "the items of turns before"),
    ({"conversation": "c"}, "conversation", "nothing is kept"),
    ({"store": True}, "store", "null or false"),
    ({"background": True}, "background", "null or false"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions and input"),
    ({"truncation": "auto"}, "truncation", "leave items out"),
    ({"max_tool_calls": 1}, "max_tool_calls", "calls no tools by itself"),
    ({"max_tokens": 5}, "max_tokens", "is not known"),
    ({"messages": [USER]}, "messages", "is not known"),
    ({"n": 2}, "n", "is not known"),
    ({"max_output_tokens": 0}, "max_output_tokens", "from 1 up"),
    ({"max_output_tokens": 8192}, "max_output_tokens", "8191"),
    ({"top_logprobs": 2}, "top_logprobs", f"where include has {LOGPROBS}"),
    ({"top_logprobs": 2000, "include": [LOGPROBS]}, "top_logprobs", "accepted"),
    ({"include": ["file_search_call.results"]}, "include[0]", "of message.output_text"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters, digits"),
    ({"tools": TOOLS * 2}, "tools", "tools[2].name = 'get_weather': another"),
    ({"tool_choice": "any"}, "tool_choice", '"required"'),
    ({"tool_choice": "required"}, "tool_choice", "with tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "now"),
    ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text.format", "without tools"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format", "not known"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "'low'"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "'detailed'"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "not known"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "as a field"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 up"),
    ({"model": "other"}, "model", "not served here"),
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
    """However it is cut: reasoning, text, calls, text, and calls that break off."""
    syntax = data.draw(st.sampled_from(sorted(CALLS)))
    tokenizer = tokenizers[syntax]
    thinks = data.draw(st.booleans())
    text = "".join(data.draw(st.lists(WORDS, max_size=4)))
    if thinks:
        text += "</think>" + "".join(data.draw(st.lists(WORDS, max_size=4)))
    for calls in data.draw(st.lists(st.sampled_from([[ROME], [NOW, ROME]]), max_size=2)):
        text += write_calls(syntax, calls) + "".join(data.draw(st.lists(WORDS, max_size=3)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    bounds = [0, *cuts, len(ids)]
    pieces = [ids[a:b] for a, b in pairwise(bounds)]
    end = data.draw(st.sampled_from(["stop", "length"]))
    scored = {"include": [LOGPROBS]} if data.draw(st.booleans()) else {}
    given = answered(tokenizer, syntax, chat_template_kwargs={"enable_thinking": thinks}, **scored)
    events, whole = given.tell(pieces, end)
    assert joined_response(events) == whole
    again = given.tell([ids], end)[1]["output"]
    assert without_ids(again) == without_ids(whole["output"])
    assert Response.model_validate(whole).output_text == "".join(
        part["text"] for item in whole["output"] if item["type"] == "message"
        for part in item["content"]
    )  # fmt: skip


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_items_come_in_order(tokenizers: dict[str, Tokenizer], syntax: str) -> None:
    given = answered(tokenizers[syntax], syntax)
    whole = given.told("Hm.</think>Well." + write_calls(syntax, [ROME, NOW]))
    assert [item["type"] for item in whole["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    thought, said, rome, now = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert thought["summary"] == []
    assert said["content"][0]["text"] == "Well."
    assert (rome["name"], json.loads(rome["arguments"])) == (ROME.name, ROME.arguments)
    assert (now["name"], json.loads(now["arguments"])) == ("now", {})
    assert len({item["id"] for item in whole["output"]}) == 4
    assert rome["call_id"] != now["call_id"]
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    usage = whole["usage"]
    assert usage["input_tokens"] == len(given.ids)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_what_ends_too_early(tokenizers: dict[str, Tokenizer]) -> None:
    given = answered(tokenizers["kimi_k2"], "kimi_k2", **QUIET)
    whole = given.told("Well", "length")
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert whole["output"][0]["status"] == "incomplete"
    cut = write_calls("kimi_k2", [NOW, ROME])
    whole = given.told("Well" + cut[: cut.index("Rome")], "length")
    said, now, rome, text = whole["output"]
    assert [each["status"] for each in (said, now, rome, text)] == [
        "completed", "completed", "incomplete", "incomplete",
    ]  # fmt: skip
    (broken,) = whole["malformed_tool_calls"]
    assert (broken["index"], broken["text"]) == (1, text["content"][0]["text"])


def test_logprobs_are_of_the_items_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """Reasoning and calls have none."""
    given = answered(tokenizers["hermes"], "hermes", include=[LOGPROBS])
    text = "Hm.</think>Well" + write_calls("hermes", [NOW])
    _, said, _ = given.told(text)["output"]
    tokens = [score["token"] for score in said["content"][0]["logprobs"]]
    assert "".join(tokens) == "Well"
    alone = answered(tokenizers["hermes"], "hermes", include=[LOGPROBS], tools=None, **QUIET)
    (said,) = alone.told("Well é")["output"]
    assert len(said["content"][0]["logprobs"]) == len("Well é".encode())


def test_what_was_asked_is_repeated(tokenizers: dict[str, Tokenizer]) -> None:
    given = answered(tokenizers["glm47"], "glm47", metadata={"a": "b"}, user="u", temperature=0.5,
                     tool_choice="required", instructions="Be.", **QUIET)  # fmt: skip
    whole = given.told("x")
    for name, value in {"metadata": {"a": "b"}, "user": "u", "temperature": 0.5, "store": False,
                        "tool_choice": "required", "instructions": "Be.", "top_p": 1.0,
                        "max_output_tokens": 1000, "text": {"format": {"type": "text"},
                                                            "verbosity": None},
                        "previous_response_id": None}.items():  # fmt: skip
        assert whole[name] == value, name
    assert whole["tools"][0]["parameters"] == WEATHER
    assert given.prompt is not None
    assert "<|system|>Be." in given.prompt
    assert json.dumps(WEATHER) in given.prompt
