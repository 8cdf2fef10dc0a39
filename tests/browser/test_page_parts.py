"""What of an answer is not its text: reasoning, calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from page_stub import PageStub
from visits import Visit

Visiting = Callable[..., Visit]


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
    return {"tool_calls": [{"index": index, "function": function} | more]}


CALLS = [
    {"content": "Let me see."},
    call(0, "", id="c0", name="get_config", type="function"),
    call(0, '{"keys": ['),
    call(1, "{", id="c1", name="now"),
    call(0, '"a", "<b>"]}'),
    call(1, "}"),
]


@pytest.fixture
def here(visit: Visiting, stub: PageStub) -> Visit:
    found = visit(stub.url)
    found.wait_until_ready()
    return found


@pytest.mark.parametrize("names", [("reasoning_content",), ("reasoning",),
                                   ("reasoning", "reasoning_content")])  # fmt: skip
def test_reasoning_is_folded(here: Visit, stub: PageStub, names: tuple[str, ...]) -> None:
    thoughts = ["I ", "*think* ", "<i>"]
    stub.answers = [[*(dict.fromkeys(names, each) for each in thoughts), {}, {"content": "yes"}]]
    here.find("#prompt").fill("go")
    here.button("Send").click()
    title = here.find(".reasoning summary")
    title.filter(has_text="Reasoning …").wait_for()
    inside = here.find(".reasoning .content")
    assert not inside.is_visible()
    title.press("Enter")
    inside.filter(has_text="I think <i>").wait_for()
    stub.holding = False
    here.wait_until_idle()
    title.filter(has_text="Reasoned for").wait_for()
    assert inside.is_visible(), "whoever has unfolded it reads on"
    assert here.find(".assistant > .content").inner_text() == "yes"
    here.send("and?")
    assert [message["content"] for message in stub.bodies[-1]["messages"]] == ["go", "yes", "and?"]
    assert "I *think*" not in str(stub.bodies[-1]), "thoughts of the turn before"


def test_calls_of_tools_are_shown_and_answered(here: Visit, stub: PageStub) -> None:
    stub.finish_reason = "tool_calls"
    stub.answers = [[{"reasoning_content": "hm"}, *CALLS], [{"content": "done"}]]
    here.send("go")
    shown = here.find(".call").all_inner_texts()
    assert ["get_config" in shown[0], "now" in shown[1], len(shown)] == [True, True, 2]
    assert '{\n  "keys": [\n    "a",\n    "<b>"\n  ]\n}' in shown[0]
    assert "calls a tool" in here.find(".stats").last.inner_text()
    here.page.reload()
    assert here.find(".call").all_inner_texts() == shown
    here.page.get_by_label("Result of get_config").fill('{"a": 1}')
    here.page.get_by_label("Result of now").fill("noon")
    here.button("Give results").click()
    here.wait_until_idle()
    assert here.said() == ["go", "Let me see.", '{"a": 1}', "noon", "done"]
    assert here.find(".results").count() == 0
    asked, answer, *results = stub.bodies[-1]["messages"]
    assert asked == {"role": "user", "content": "go"}
    assert answer == {
        "role": "assistant", "content": "Let me see.", "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c0", "type": "function",
             "function": {"name": "get_config", "arguments": '{"keys": ["a", "<b>"]}'}},
            {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }  # fmt: skip
    assert results == [
        {"role": "tool", "tool_call_id": "c0", "name": "get_config", "content": '{"a": 1}'},
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "noon"},
    ]


def test_calls_that_nobody_answers_are_not_sent(here: Visit, stub: PageStub) -> None:
    """Templates refuse calls without results."""
    stub.answers = [CALLS, [{"content": "done"}]]
    here.send("go")
    here.send("never mind")
    assert stub.bodies[-1]["messages"] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "user", "content": "never mind"},
    ]
    assert here.find(".results").count() == 0


def test_a_call_that_is_none_after_all_is_text(here: Visit, stub: PageStub) -> None:
    dropped = {"content": "now(", "malformed_tool_calls": [{"index": 1, "reason": "", "text": ""}]}
    stub.answers = [[*CALLS[:5], dropped]]
    here.send("go")
    (shown,) = here.find(".call").all_inner_texts()
    assert "get_config" in shown
    assert "Let me see.now(" in here.find(".assistant > .content").inner_text()


def test_tools_are_a_setting(here: Visit, stub: PageStub) -> None:
    stub.say("ok")
    tools = [{"type": "function", "function": {"name": "now"}}]
    here.find("#open-settings").click()
    here.page.get_by_label("Tools (JSON)").fill(json.dumps(tools))
    here.button("Done").click()
    here.send("go")
    assert stub.bodies[-1]["tools"] == tools
    here.find("#open-settings").click()
    here.page.get_by_label("Tools (JSON)").fill("{}")
    assert here.page.get_by_label("Tools (JSON)").evaluate("e => e.validationMessage") == (
        "not a list in JSON"
    )


def test_arguments_that_are_no_json_stay_as_they_are(here: Visit, stub: PageStub) -> None:
    stub.answers = [[call(0, '{"a": <oops>', id="c", name="f")]]
    here.send("go")
    assert '{"a": <oops>' in here.find(".call").inner_text()


def test_to_retry_while_it_answers_stops_the_first(here: Visit, stub: PageStub) -> None:
    stub.answers = [[{"content": "one"}, {}], [{"content": "two"}, {}]]
    here.find("#prompt").fill("go")
    here.button("Send").click()
    here.find(".assistant > .content").filter(has_text="one").wait_for()
    here.button("Retry").click()
    here.find(".assistant > .content").filter(has_text="two").wait_for()
    assert here.find("#stop").is_visible(), "the second is still being made"
    here.button("Stop").click()
    here.wait_until_idle()
    assert here.said() == ["go", "two"]


@pytest.mark.parametrize("stored", ["[1]", "{}", '[{"role": "user"}]', "[null]", "x", '"x"',
                                    '[{"role": "system", "content": "x"}]'])  # fmt: skip
def test_what_is_stored_may_be_broken(visit: Visiting, stub: PageStub, stored: str) -> None:
    stub.say("fine")
    here = visit(stub.url, conversation=stored)
    here.wait_until_ready()
    here.send("go")
    assert here.said() == ["go", "fine"]
