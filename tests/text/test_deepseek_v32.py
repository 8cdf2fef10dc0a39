"""DeepSeek-V3.2's encoding: when it is chosen, its arguments, what it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import published
from deepseek_chats import TOKENS, A, B, E, N, T, U, make
from trueline.describe import describe
from trueline.errors import UsageError
from trueline.text.chat import render_chat
from trueline.text.deepseek_v32 import TOOLS as PUBLISHED
from trueline.text.encodings import find_encoding
from trueline.text.tokenizer import Tokenizer

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello", "reasoning_content": "a greeting"}
CALLED = HELLO | {"tool_calls": [{"id": "i", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "i", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("v32"), model_type="deepseek_v32")


def with_program(directory: Path, program: str) -> Tokenizer:
    (directory / "encoding").mkdir(exist_ok=True)
    (directory / "encoding" / "encoding_dsv32.py").write_text(program)
    return make(directory, model_type="deepseek_v32")


def test_chosen_by_model_type_where_there_is_no_template(v32: Tokenizer, tmp_path: Path) -> None:
    assert v32.has_chat_form
    assert v32.chat_encoding is not None
    assert (v32.chat_encoding.title, v32.chat_encoding.calls) == ("DeepSeek-V3.2", "deepseek_v32")
    assert render_chat(v32, [HI]) == f"{B}{U}hi{A}{N}"
    tokenizer = make(tmp_path, model_type="deepseek_v32")
    tokenizer.chat_templates = {"default": "{{ messages[0].content }}"}  # serve --chat-template
    assert tokenizer.chat_encoding is None
    assert render_chat(tokenizer, [HI]) == "hi"
    for kind in ("deepseek_v3", "glm_moe_dsa", None):
        assert find_encoding({"model_type": kind}, None) is None


def test_inspect(tmp_path: Path) -> None:
    with_program(tmp_path, "")
    (tmp_path / "config.json").write_text(json.dumps(published.V32))
    facts = {"thinking": False, "tools_text": "published"}
    for model in (tmp_path, tmp_path / "config.json"):
        chat = describe(model)["chat"]
        assert chat["kind"] == "encoding of DeepSeek-V3.2"
        assert {fact["name"]: fact["value"] for fact in chat["facts"]} == facts
    (tmp_path / "chat_template.jinja").write_text("x")
    assert describe(tmp_path)["chat"] is None


@pytest.mark.parametrize(
    ("arguments", "mark"),
    [
        ({}, N),
        ({"thinking": None, "enable_thinking": None}, N),
        ({"thinking": True}, T),
        ({"enable_thinking": True}, T),
        ({"enable_thinking": False, "drop_thinking": True}, N),
    ],
)
def test_thinks_when_told_to(arguments: dict[str, Any], mark: str, v32: Tokenizer) -> None:
    assert render_chat(v32, [HI], **arguments) == f"{B}{U}hi{A}{mark}"


@pytest.mark.parametrize(
    ("arguments", "name", "says"),
    [
        ({"thinking": 1}, "thinking", "1; accepted: true or false"),
        ({"drop_thinking": "no"}, "drop_thinking", "true or false"),
        ({"thinking": True, "enable_thinking": False}, "thinking", "enable_thinking"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "thinking, enable_thinking, drop_"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], name: str, says: str, v32: Tokenizer) -> None:
    with pytest.raises(UsageError) as caught:
        render_chat(v32, [HI], **arguments)
    assert str(caught.value).startswith(f"chat_template_kwargs.{name}: ")
    assert says in str(caught.value)


def test_without_a_generation_prompt(v32: Tokenizer) -> None:
    for thinking, mark in ((True, T), (False, N)):
        assert render_chat(v32, [HI], False, thinking=thinking) == f"{B}{U}hi"
        whole = render_chat(v32, [HI, CALLED, RESULT], thinking=thinking)
        found = render_chat(v32, [HI, CALLED, RESULT], False, thinking=thinking)
        assert whole == f"{found}\n\n{mark}"
        assert found.endswith("<result>4</result>\n</function_results>")
        reasoning = f"a greeting{N}" if thinking else ""
        assert render_chat(v32, [HI, HELLO], False, thinking=thinking) == (
            f"{B}{U}hi{A}{mark}{reasoning}hello{E}"
        )


def test_task_is_not_rendered(v32: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"^messages\[0\]\.task: not rendered for DeepSeek-V3\.2"):
        render_chat(v32, [HI | {"task": "query"}])


@pytest.mark.parametrize("missing", [U, A, T, N])
def test_tokens_that_the_vocabulary_lacks(missing: str, tmp_path: Path) -> None:
    tokens = tuple(name for name in TOKENS if name != missing)
    tokenizer = make(tmp_path, tokens, model_type="deepseek_v32")
    with pytest.raises(UsageError, match=f"V3.2's encoding needs {missing}, which"):
        render_chat(tokenizer, [HI])


# -- the checkpoint's own program --------------------------------------------------------------

OWN = (
    "TOOLS_SYSTEM_TEMPLATE = 'Use {{these}} {thinking_end_token}\\n{tool_schemas}\\n{dsml_token}'\n"
)


def test_its_text_about_tools_is_taken(tmp_path: Path) -> None:
    """It is read, and never runs."""
    tokenizer = with_program(tmp_path, OWN + "raise SystemExit(7)\n")
    two = [*TOOLS, {"type": "function", "function": {"name": "g", "x": "é"}}]
    schemas = '{"name": "f"}\n{"name": "g", "x": "é"}'
    text = f"\n\nUse {{these}} </think>\n{schemas}\n｜DSML｜"
    assert render_chat(tokenizer, [HI], tools=two) == f"{B}{text}{U}hi{A}{N}"
    found = find_encoding({"model_type": "deepseek_v32"}, tmp_path)
    assert found is not None
    fact = found.facts["tools_text"]
    assert (fact.value, fact.source.kind) == ("its own", "key")
    assert fact.source.text == "encoding/encoding_dsv32.py: TOOLS_SYSTEM_TEMPLATE"


@pytest.mark.parametrize("program", ["", "TOOLS_SYSTEM_TEMPLATE = 3\n", "x = 1\n"])
def test_a_program_that_does_not_say(program: str, v32: Tokenizer, tmp_path: Path) -> None:
    tokenizer = with_program(tmp_path, program)
    assert render_chat(tokenizer, [HI], tools=TOOLS) == render_chat(v32, [HI], tools=TOOLS)


def test_the_published_text_is_known(v32: Tokenizer, tmp_path: Path) -> None:
    tokenizer = with_program(tmp_path, f"TOOLS_SYSTEM_TEMPLATE = {PUBLISHED!r}\n")
    assert render_chat(tokenizer, [HI], tools=TOOLS) == render_chat(v32, [HI], tools=TOOLS)
    found = find_encoding({"model_type": "deepseek_v32"}, tmp_path)
    assert found is not None
    assert found.facts["tools_text"].value == "published"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no schemas", "has {tool_schemas} 0 times; accepted: once"),
        ("{tool_schemas}{tool_schemas}", "has {tool_schemas} 2 times"),
        ("{tool_schemas}{other}", "holds {other}; accepted: dsml_token"),
        ("{tool_schemas!r}", "holds {tool_schemas}"),
        ("{tool_schemas:>9}", "holds {tool_schemas}"),
        ("{tool_schemas.__class__}", "holds {tool_schemas.__class__}"),
        ("{tool_schemas}}", "Single '}'"),
    ],
)
def test_a_text_that_cannot_be_read(text: str, says: str, tmp_path: Path) -> None:
    tokenizer = with_program(tmp_path, f"TOOLS_SYSTEM_TEMPLATE = {text!r}\n")
    with pytest.raises(UsageError) as caught:
        render_chat(tokenizer, [HI])
    assert str(caught.value).startswith("encoding/encoding_dsv32.py: TOOLS_SYSTEM_TEMPLATE: ")
    assert says in str(caught.value)


def test_its_default_for_thinking_is_taken(tmp_path: Path) -> None:
    program = "def encode_messages(messages, thinking_mode='thinking'): pass\n"
    assert render_chat(with_program(tmp_path, program), [HI]) == f"{B}{U}hi{A}{T}"
