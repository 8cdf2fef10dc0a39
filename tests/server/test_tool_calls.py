"""Calls of tools: what a request offers, and what a client gets of an answer that calls."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trueline.server.chat_page
from chat_answers import Call, write_calls
from chat_tokenizers import TEMPLATE
from offered_tools import LIMITS, TOOLS, USER, WEATHER, Chat, calling_tokenizer, tool
from trueline.server.protocol import ApiError, read_chat
from trueline.server.protocol.tools import ToolsAsked
from trueline.text.formats.choose import CALLS
from trueline.text.tokenizer import Tokenizer

ROME = Call("get_weather", {"city": 'Rome "x" é', "days": 3})
NOW = Call("now", {})


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("callers")
    return {syntax: calling_tokenizer(directory / syntax, syntax) for syntax in CALLS}


def read(**fields: Any) -> ToolsAsked | None:
    body = json.dumps({"messages": [USER], "tools": TOOLS} | fields).encode()
    return read_chat(body, LIMITS).conversation.tools


def test_what_is_offered() -> None:
    asked = read()
    assert asked is not None
    assert (asked.choice, asked.named, asked.parallel) == ("auto", None, True)
    weather, now = asked.functions
    assert (weather.name, weather.parameters, weather.strict) == ("get_weather", WEATHER, False)
    assert weather.where == "tools[0].function.parameters"
    assert weather.shown == TOOLS[0]
    assert now.parameters == {"type": "object", "properties": {}}
    asked = read(tool_choice={"type": "function", "function": {"name": "now"}})
    assert asked is not None
    assert (asked.choice, asked.named) == ("required", "now")
    assert [each.name for each in asked.callable] == ["now"]
    assert asked.shown is not None
    assert len(asked.shown) == 2
    asked = read(tool_choice="none", parallel_tool_calls=False)
    assert asked is not None
    assert (asked.callable, asked.shown, asked.schemas, asked.parallel) == ((), None, None, False)
    for nothing in (None, []):
        assert read(tools=nothing, tool_choice="auto", functions=nothing) is None


def test_fields_are_shown_in_their_order() -> None:
    text = '{"type": "function", "function": {"strict": null, "description": "d", "name": "f"}}'
    body = b'{"messages": [{"role": "user", "content": "a"}], "tools": [%s]}' % text.encode()
    asked = read_chat(body, LIMITS).conversation.tools
    assert asked is not None
    assert list(asked.functions[0].shown["function"]) == ["description", "name", "parameters"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [*TOOLS, tool("now")]}, "tools", "tools[2].function.name = 'now': another"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "found 129 entries"),
        ({"tools": [tool("f", description="x" * 600_000)]}, "tools", "accepted: up to 524288"),
        ({"tools": [tool("f", required=True)]}, "tools[0].function.required", "not known"),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict", "found a text"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "function"),
        ({"tools": {}}, "tools", "a list of up to 128 tools"),
        ({"tool_choice": "any"}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "noW"}}}, "tool_choice", "now"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "with tools"),
        ({"functions": [{"name": "f"}]}, "functions", "not offered"),
        ({"function_call": {"name": "f"}}, "function_call", "not offered"),
    ],
)
def test_what_cannot_be_offered(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message


def calls_in(message: dict[str, Any]) -> list[Call]:
    return [
        Call(each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_calls_are_told(tokenizers: dict[str, Tokenizer], syntax: str) -> None:
    chat = Chat(tokenizers[syntax], syntax)
    message = chat.told("Well. " + write_calls(syntax, [ROME, NOW]))
    assert calls_in(message) == [ROME, NOW]
    assert (message["content"], chat.whole["finish_reason"]) == ("Well.", "tool_calls")
    ids = [each["id"] for each in message["tool_calls"]]
    if syntax == "kimi_k2":
        assert ids == ["functions.get_weather:0", "functions.now:1"]
    else:
        assert len(set(ids)) == 2
        assert all(each.startswith("call_") for each in ids)
    alone = chat.told(write_calls(syntax, [NOW]))
    assert alone["content"] is None


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}])
@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_calls_that_come_at_once_have_a_chunk_each(
    tokenizers: dict[str, Tokenizer], syntax: str, fields: dict[str, Any]
) -> None:
    """As where a client has read slowly: instructor and others take the first of a list."""
    tokenizer = tokenizers[syntax]
    chat = Chat(tokenizer, syntax, **fields)
    text = "Well. " + write_calls(syntax, [ROME, NOW])
    chat.answer([tokenizer.encode(text, add_special_tokens=False)])
    assert calls_in(chat.whole["message"]) == [ROME, NOW]
    pieces = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chat.chunks]
    assert [len(piece) for piece in pieces if piece] == [1, 1]


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_what_comes_with_calls_is_told_once_and_before_them(
    tokenizers: dict[str, Tokenizer], syntax: str
) -> None:
    """Text, logprobs and token ids of a step that has several calls."""
    tokenizer = tokenizers[syntax]
    chat = Chat(tokenizer, syntax, logprobs=True, return_token_ids=True)
    text = "Well. " + write_calls(syntax, [ROME, NOW])
    chat.answer([tokenizer.encode(text, add_special_tokens=False)])
    choices = [chunk["choices"][0] for chunk in chat.chunks]
    scores = [each["logprobs"]["content"] for each in choices if each["logprobs"]]
    assert [score for some in scores for score in some] == chat.whole["logprobs"]["content"]
    ids = [token for each in choices for token in each.get("token_ids") or ()]
    assert ids == chat.whole["token_ids"]
    says = [i for i, each in enumerate(choices) if each["delta"].get("content")]
    calls = [i for i, each in enumerate(choices) if each["delta"].get("tool_calls")]
    assert max(says) <= min(calls)


def test_arguments_come_in_pieces(tokenizers: dict[str, Tokenizer]) -> None:
    chat = Chat(tokenizers["kimi_k2"], "kimi_k2")
    chat.told(write_calls("kimi_k2", [ROME]))
    pieces = [c["choices"][0]["delta"].get("tool_calls") for c in chat.chunks]
    assert sum(piece is not None for piece in pieces) > 20


def test_ids_differ(tokenizers: dict[str, Tokenizer]) -> None:
    text = write_calls("kimi_k2", [NOW, NOW, NOW]).replace("now:1", "now:0").replace(":2", "")
    message = Chat(tokenizers["kimi_k2"], "kimi_k2").told(text)
    assert [each["id"] for each in message["tool_calls"]] == [
        "functions.now:0", "functions.now:1", "functions.now:2",
    ]  # fmt: skip


def test_a_malformed_call_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    for syntax in CALLS:
        chat = Chat(tokenizers[syntax], syntax)
        text = write_calls(syntax, [ROME])
        for end in ("length", "stop"):
            cut = text[: text.index("Rome")]
            message = chat.told("A " + cut, end)
            (told,) = message["malformed_tool_calls"]
            assert told["reason"] == "the answer ended within the call"
            assert told["index"] == (None if syntax == "hermes!" else 0)
            assert message["content"].endswith(told["text"])
            assert cut.endswith(told["text"])
            assert "tool_calls" not in message
            assert chat.whole["finish_reason"] == end
        unknown = chat.told(write_calls(syntax, [Call("rm_rf", {"city": "x"}), NOW]))
        (told,) = unknown["malformed_tool_calls"]
        assert "none of the functions offered" in told["reason"]
        assert "rm_rf" in unknown["content"]
        assert calls_in(unknown) == [NOW]


def test_calls_are_content_where_none_may_be_made(tokenizers: dict[str, Tokenizer]) -> None:
    text = write_calls("glm47", [NOW])
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        chat = Chat(tokenizers["glm47"], "glm47", **fields)
        assert chat.told(text)["content"] == text
        assert chat.prompt is not None
        assert "tools" not in chat.prompt


def test_one_call_where_one_is_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    for syntax in CALLS:
        chat = Chat(tokenizers[syntax], syntax, parallel_tool_calls=False)
        message = chat.told(write_calls(syntax, [ROME, NOW]), "length")
        assert calls_in(message) == [ROME]
        assert chat.whole["finish_reason"] == "tool_calls"


def test_stop_strings_are_of_the_content(tokenizers: dict[str, Tokenizer]) -> None:
    chat = Chat(tokenizers["kimi_k2"], "kimi_k2", stop=["Rome", "b{"])
    message = chat.told("a b" + write_calls("kimi_k2", [ROME]))
    assert calls_in(message) == [ROME]
    assert message["content"] == "a b"
    message = chat.told("a b" + write_calls("kimi_k2", [ROME]) + "{c")
    assert (message["content"], calls_in(message)) == ("a b{c", [ROME]), "not across a call"
    message = chat.told("in Rome" + write_calls("kimi_k2", [ROME]))
    assert (message["content"], chat.whole["stop_reason"]) == ("in ", "Rome")
    assert chat.whole["finish_reason"] == "stop"


def test_calls_within_reasoning_are_none(tokenizers: dict[str, Tokenizer]) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    for syntax in sorted(set(CALLS) - {"kimi_k2"}):
        call = write_calls(syntax, [NOW])
        message = Chat(tokenizers[syntax], syntax, **thinks).told(f"so {call}</think>b")
        assert message["reasoning_content"].startswith("so ")
        assert (message["content"], calls_in(message)) == ("b", [])


GLM = [write_calls("glm47", [call]) for call in (ROME, NOW, Call("no", {}))]
MARKS = ["</think>", "<tool_call>now", "</tool_call>", "<arg_key>city", "</arg_key>"]
PIECES = st.sampled_from(["a", "\n", "<", "é", *MARKS, *GLM])


@given(
    texts=st.lists(PIECES, max_size=6),
    cuts=st.sets(st.integers(1, 200)),
    stop=st.sampled_from([[], ["a"], ["<", "é"]]),
    thinking=st.booleans(),
    parallel=st.booleans(),
    logprobs=st.booleans(),
    end=st.sampled_from(["stop", "length"]),
)
def test_any_cut_says_the_same(
    tokenizers: dict[str, Tokenizer], texts: list[str], cuts: set[int], stop: list[str],
    thinking: bool, parallel: bool, logprobs: bool, end: str,
) -> None:  # fmt: skip
    tokenizer = tokenizers["glm47"]
    switch = {"enable_thinking": thinking}
    chat = Chat(tokenizer, "glm47", stop=stop, chat_template_kwargs=switch,
                parallel_tool_calls=parallel, logprobs=logprobs)  # fmt: skip
    ids = tokenizer.encode("".join(texts), add_special_tokens=False)
    ends = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]

    def told(pieces: list[list[int]]) -> tuple[Any, ...]:
        found = chat.answer(pieces, end)
        calls = [(call.name, call.arguments, call.place, call.ended) for call in found.calls]
        return found.text, found.reasoning, calls, found.malformed, chat.whole["finish_reason"]

    single = told([*([token] for token in ids), []])
    assert told([ids[a:b] for a, b in pairwise(ends)] or [[]]) == single


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_the_page_reads_them(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """What the page makes of a stream is what the whole says."""
    chat = Chat(tokenizers["kimi_k2"], "kimi_k2")
    text = "Well. " + write_calls("kimi_k2", [ROME, NOW])
    chat.told(text + write_calls("kimi_k2", [ROME])[:-50], "length")
    page = Path(trueline.server.chat_page.__file__).parent / "page"
    shutil.copytree(page, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    code = (
        f"import {{ Answer }} from '{tmp_path}/answer.js';"
        "const message = {content: ''}; const answer = new Answer(message);"
        f"for (const chunk of {json.dumps(chat.chunks)}) answer.take(chunk);"
        "console.log(JSON.stringify(message));"
    )
    assert NODE is not None
    made = subprocess.run(
        [NODE, "--input-type=module", "-"], input=code, capture_output=True, text=True, timeout=60
    )
    found = json.loads(made.stdout)
    whole = chat.whole["message"]
    assert found["content"] == whole["content"]
    assert [
        {"id": c["id"], "type": "function",
         "function": {"name": c["name"], "arguments": c["arguments"]}} for c in found["calls"]
    ] == whole["tool_calls"]  # fmt: skip
    assert found["finish"] == chat.whole["finish_reason"]


# -- history ---------------------------------------------------------------------------------

SAID = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function",
                    "function": {"name": "now", "arguments": '{"a":  1}'}}],
}  # fmt: skip
FOUND = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
WRITES_ARGUMENTS = (
    "{{ call.function.arguments if call.function.arguments is string else "
    "call.function.arguments | tojson }}"
)
AS_JSON = TEMPLATE.replace(WRITES_ARGUMENTS, "{{ call.function.arguments | tojson }}")
OBJECTS = TEMPLATE.replace(
    WRITES_ARGUMENTS,
    "{% for key, value in call.function.arguments.items() %}{{ key ~ '=' ~ value }}{% endfor %}",
)


def prompt_of(tokenizer: Tokenizer, *messages: dict[str, Any], **fields: Any) -> str:
    found = Chat(tokenizer, "glm47", messages=[USER, *messages], **fields).prompt
    assert found is not None
    return found


def test_calls_and_results_in_the_history(
    tokenizers: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("templates")
    as_text = tokenizers["glm47"]
    assert '[c1 now {"a":  1}]' in prompt_of(as_text, SAID, FOUND)
    assert OBJECTS != TEMPLATE
    as_objects = calling_tokenizer(directory / "objects", "glm47", template=OBJECTS)
    assert "[c1 now a=1]" in prompt_of(as_objects, SAID, FOUND)
    as_json = calling_tokenizer(directory / "json", "glm47", template=AS_JSON)
    assert '[c1 now {"a": 1}]' in prompt_of(as_json, SAID, FOUND)
    given = json.loads(json.dumps(SAID))
    given["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    assert '[c1 now {"a": 1}]' in prompt_of(as_text, given, FOUND)
    for nothing in ("", None):
        given["tool_calls"][0]["function"]["arguments"] = nothing
        assert "[c1 now {}]" in prompt_of(as_text, given, FOUND)
        assert "[c1 now ]" in prompt_of(as_objects, given, FOUND)
    for none in (None, []):
        prompt_of(as_text, {"role": "assistant", "content": "a", "tool_calls": none})
    reasoned = {**SAID, "reasoning_content": "hm"}
    assert "<think>hm</think>" in prompt_of(as_text, reasoned, FOUND)


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ({}, "messages[1].tool_calls"),
        ([1], "messages[1].tool_calls[0]"),
        ([{"id": "a", "function": {}}], "messages[1].tool_calls[0]"),
        ([{"id": 1, "function": {"name": "f"}}], "messages[1].tool_calls[0].id"),
        ([{"function": {"name": "f", "arguments": "{"}}],
         "messages[1].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": "[1]"}}],
         "messages[1].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": "{" + " " * (1 << 20)}}],
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_calls_that_no_prompt_shows(
    tokenizers: dict[str, Tokenizer], calls: Any, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        prompt_of(tokenizers["glm47"], {"role": "assistant", "tool_calls": calls})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "accepted: " in caught.value.message


def test_a_result_of_a_call_whose_id_is_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(ApiError) as caught:
        prompt_of(tokenizers["glm47"], SAID, {**FOUND, "tool_call_id": [1]})
    assert (caught.value.status, caught.value.param) == (400, "messages[2].tool_call_id")


def test_a_template_without_tools_is_not_given_any(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("without")
    no_tools = TEMPLATE.replace("{% if tools %}tools {{ tools | tojson }}{% endif %}", "")
    no_calls = no_tools.replace("message.tool_calls or []", "[]")
    tokenizer = calling_tokenizer(directory, "glm47", template=no_calls)
    for fields, param in (({}, "tools"), ({"tools": None, "messages": [USER, SAID, FOUND]},
                                          "messages[1].tool_calls")):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            Chat(tokenizer, "glm47", **fields)
        assert caught.value.param == param
        assert "chat template shows n" in caught.value.message
    Chat(tokenizer, "glm47", tool_choice="none")
    with pytest.raises(ApiError, match="--tool-call-parser"):
        Chat(calling_tokenizer(directory, "glm47"), "none")
