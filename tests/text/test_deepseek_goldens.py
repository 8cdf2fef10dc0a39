"""DeepSeek-V3.2 and V4: prompts as published encoders make them (goldens/ says which)."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from deepseek_chats import TOKENS, make
from trueline.errors import UsageError
from trueline.text.chat import render_chat
from trueline.text.tokenizer import Tokenizer

FAMILIES = ("deepseek_v32", "deepseek_v4")
MODES = {
    "chat": {"thinking": False},
    "thinking": {"thinking": True},
    "all kept": {"thinking": True, "drop_thinking": False},
}
STOPS = "stops"
Chat = list[dict[str, Any]]


def read(family: str) -> dict[str, Any]:
    found = json.loads((Path(__file__).parent / "goldens" / f"{family}.json").read_text())
    assert isinstance(found, dict)
    return found


GOLDENS = {family: read(family) for family in FAMILIES}


def whole(family: str, text: str) -> str:
    """With the texts about tools, which stand once in the file."""
    for short, long in GOLDENS[family]["preamble"].items():
        text = text.replace(short, long)
    return text


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        family: make(tmp_path_factory.mktemp(family), TOKENS, model_type=family)
        for family in FAMILIES
    }


def rendered(tokenizer: Tokenizer, case: dict[str, Any], **arguments: Any) -> str:
    return render_chat(tokenizer, case["messages"], True, case.get("tools"), **arguments)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in GOLDENS[family]["cases"]]
)
def test_cases(family: str, name: str, tokenizers: dict[str, Tokenizer]) -> None:
    case = GOLDENS[family]["cases"][name]
    for mode, arguments in MODES.items():
        wanted = case["prompts"][mode]
        if not isinstance(wanted, dict):  # where the published program stops, see below
            assert rendered(tokenizers[family], case, **arguments) == whole(family, wanted), mode


ASSISTANT = {"role": "assistant", "content": "a", "reasoning_content": "r"}
CALLS = [
    {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"x": "1", "y": 2}'}},
    {"id": "j", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
LETTERS: dict[str, Chat] = {
    "s": [{"role": "system", "content": "s"}],
    "u": [{"role": "user", "content": "u"}],
    "d": [{"role": "developer", "content": "d"}],
    "a": [ASSISTANT],
    "n": [{"role": "assistant", "content": "n"}],
    "w": [
        {"role": "assistant", "content": None, "reasoning_content": "w", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "i", "content": "one"},
        {"role": "tool", "tool_call_id": "j", "content": "two"},
    ],
    "r": [{"role": "latest_reminder", "content": "now"}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_order_of_roles(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    """All of three messages, with and without thinking."""
    orders, stopped = GOLDENS[family]["orders"], set()
    assert len(orders) == {"deepseek_v32": 6 + 36 + 216, "deepseek_v4": 7 + 49 + 343}[family]
    for order, wanted in orders.items():
        messages = [message for letter in order for message in LETTERS[letter]]
        found = [render_chat(tokenizers[family], messages, **mode) for mode in MODES.values()]
        for mode, prompt, digest in zip(MODES, found, wanted, strict=True):
            if digest == STOPS:
                stopped.add((order, mode))
            else:
                assert sha256(prompt.encode()).hexdigest()[:12] == digest, (order, mode, prompt)
    # as deepseek_v32.py says: an answer without reasoning behind the last question, a developer's
    # message left out. V4's never does
    assert all(
        "n" in order[last_asking(order) + 1 :]
        or (mode == "thinking" and "d" in order[: last_asking(order)])
        for order, mode in stopped
    )
    assert bool(stopped) == (family == "deepseek_v32")


def last_asking(order: str) -> int:
    return max(order.rfind("u"), order.rfind("d"))


def test_where_the_published_encoder_stops(tokenizers: dict[str, Tokenizer]) -> None:
    v32 = tokenizers["deepseek_v32"]
    user, developer = LETTERS["u"][0], LETTERS["d"][0]
    kept = render_chat(v32, [developer, user], thinking=True, drop_thinking=False)
    assert "The user's message is: d" in kept
    assert render_chat(v32, [developer, user], thinking=True) == render_chat(
        v32, [user], thinking=True
    )
    assert render_chat(v32, [developer, user]) == kept.replace("<think>", "</think>")
    found = render_chat(v32, [user, *LETTERS["n"]], thinking=True)
    assert found.endswith("<｜User｜>u<｜Assistant｜><think></think>n<｜end▁of▁sentence｜>")


def test_every_effort_with_tools(tokenizers: dict[str, Tokenizer]) -> None:
    goldens = GOLDENS["deepseek_v4"]
    cases = goldens["cases"]
    chats = [
        {"messages": LETTERS["u"], "tools": cases["tools before a user"]["tools"]},
        cases["reasoning around calls"],
        cases["reasoning around calls, no tools"],
        cases["developers go without"],
    ]
    for name, wanted in goldens["efforts"].items():
        profile, effort = name.split()
        found = [
            rendered(
                tokenizers["deepseek_v4"],
                chat,
                thinking=thinking,
                effort_profile=profile,
                reasoning_effort=None if effort == "None" else effort,
            )
            for chat in chats
            for thinking in (True, False)
        ]
        assert [sha256(prompt.encode()).hexdigest()[:12] for prompt in found] == wanted, name


# -- what is refused ---------------------------------------------------------------------------

REFUSED = {
    "unknown role": "messages[0].role = 'SYSTEM': accepted by DeepSeek-V",
    "a result first": "messages[0].role = 'tool': no call waits",
    "a result behind a user": "messages[1].role = 'tool': no call waits",
    "a result behind an answer": "messages[2].role = 'tool': no call waits",
    "more results than calls": "messages[4].tool_call_id = 'i': messages[2] has its result",
    "a result missing": "messages[1].tool_calls[1] (g) has no result",
    "all results missing": "messages[1].tool_calls[0] (f) has no result",
    "the last result missing": "messages[1].tool_calls[1] (g) has no result",
    "an id that no call has": "messages[3].tool_call_id = 'x': accepted: an id of "
    "messages[1].tool_calls ('i', 'j')",
    "one id twice": "messages[3].tool_call_id = 'i': messages[2] has its result",
    "one id missing": "messages[3].tool_call_id is missing: accepted: an id of",
    "ids where calls have none": "messages[2].tool_call_id = 'i': accepted: an id of "
    "messages[1].tool_calls (none",
    "two calls of one id": "messages[1].tool_calls[1].id = 'i': another call has it",
    "arguments that are no JSON": "messages[1].tool_calls[0].function.arguments = '{x}'",
    "arguments that are a list": "messages[1].tool_calls[0].function.arguments = '[1]'",
    "a call without a name": "messages[1].tool_calls[0].function.name = None",
    "a call without a function": "messages[1].tool_calls[0] = {",
    "a developer who says nothing": "messages[0].content is empty",
}
TAKEN = {"arguments that are empty", "an answer without reasoning"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", GOLDENS["deepseek_v32"]["malformed"])
def test_malformed(name: str, family: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Refused with the place, also where the published encoders make something of them."""
    malformed = GOLDENS[family]["malformed"]
    assert set(malformed) == {*REFUSED, *TAKEN}
    messages = malformed[name]["messages"]
    for mode in ("chat", "thinking"):
        if name in TAKEN:
            render_chat(tokenizers[family], messages, **MODES[mode])
            continue
        with pytest.raises(UsageError) as caught:
            render_chat(tokenizers[family], messages, **MODES[mode])
        assert str(caught.value).startswith(REFUSED[name])


def test_results_by_position_are_as_many_as_calls(tokenizers: dict[str, Tokenizer]) -> None:
    messages: Chat = [*LETTERS["u"], LETTERS["w"][0], *({"role": "tool", "content": "1"},) * 3]
    for tokenizer in tokenizers.values():
        with pytest.raises(UsageError, match=r"^messages\[4\]: messages\[1\] has 2 calls"):
            render_chat(tokenizer, messages)
        render_chat(tokenizer, messages[:4])


def test_results_come_in_any_order(tokenizers: dict[str, Tokenizer]) -> None:
    """An id says which call a result is of; the published encoder of V3.2 does not look at it."""
    first, *results = LETTERS["w"]
    for tokenizer in tokenizers.values():
        wanted = render_chat(tokenizer, [*LETTERS["u"], first, *results])
        assert render_chat(tokenizer, [*LETTERS["u"], first, *results[::-1]]) == wanted
        assert wanted.index("one") < wanted.index("two")


def test_arguments_that_are_empty_are_none(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        found = [
            render_chat(tokenizer, [*LETTERS["u"], ASSISTANT | {"tool_calls": [call]}])
            for call in (
                {"function": {"name": "f", "arguments": arguments}}
                for arguments in ("", "{}", " {} ", {}, None)
            )
        ]
        assert len(set(found)) == 1
        assert 'invoke name="f">\n\n</' in found[0]


@pytest.mark.parametrize(
    ("tools", "starts"),
    [
        ({"type": "function"}, "tools = {"),
        ([{"type": "function"}], "tools[0] = {"),
        ([{"type": "custom", "function": {"name": "f"}}], "tools[0] = {"),
        ([{"function": {"name": "f"}}, {"function": {"name": ""}}], "tools[1].function.name = ''"),
        ([{"function": {"name": 3}}], "tools[0].function.name = 3"),
    ],
)
def test_refused_tools(tools: Any, starts: str, tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(UsageError) as caught:
            render_chat(tokenizer, LETTERS["u"], tools=tools)
        assert str(caught.value).startswith(starts)


def test_tools_in_one_place(tokenizers: dict[str, Tokenizer]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    system = LETTERS["s"][0] | {"tools": tools}
    for tokenizer in tokenizers.values():
        by_message = render_chat(tokenizer, [system, *LETTERS["u"]])
        assert render_chat(tokenizer, LETTERS["s"] + LETTERS["u"], tools=tools) == by_message
        with pytest.raises(UsageError, match=r"^messages\[0\]\.tools: the request has tools"):
            render_chat(tokenizer, [system, *LETTERS["u"]], tools=tools)
