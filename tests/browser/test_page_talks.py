"""What a user does on the chat page: say something, stop, retry, edit, begin anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from page_stub import PageStub
from servers import SECONDS, Served, serving
from visits import PHONE, Visit

Visiting = Callable[..., Visit]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Path("witness-v3")) as server:
        yield server


def test_a_built_in_model_answers(visit: Visiting, served: Served) -> None:
    here = visit(served.url, settings={"temperature": "0"})
    here.wait_until_ready()
    here.send("Tom has 3 apples and buys 4 more.")
    here.send("And how many are left?")
    client = served.client()
    (model,) = (card.id for card in client.models.list())
    said = here.said()
    history = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), said, strict=False)
    ]
    whole = client.chat.completions.create(model=model, messages=history, temperature=0)
    assert said[3] == whole.choices[0].message.content.strip()
    assert here.find("#model").input_value() == model
    assert "tokens" in here.find(".stats").last.inner_text()


def test_stop_ends_the_request_on_the_server(visit: Visiting, tiny: Callable[..., Path]) -> None:
    with serving(tiny("deepseek_v3")) as served:
        here = visit(served.url, settings={"temperature": "0", "max_tokens": "3000"})
        here.find("#prompt").fill("on and on")
        here.button("Send").click()
        here.find(".stats").filter(has_text="tokens/s").wait_for()
        assert served.metric("trueline:num_requests_running") == 1
        here.page.keyboard.press("Escape")
        here.wait_until_idle()
        end = time.monotonic() + SECONDS
        while served.metric("trueline:num_requests_running"):
            assert time.monotonic() < end
        assert served.metric("trueline:generation_tokens_total") < 3000
        assert "stopped" in here.find(".stats").last.inner_text()
        here.page.close()  # before its server


def test_retry_and_edit_send_what_came_before(visit: Visiting, stub: PageStub) -> None:
    stub.say("an answer")
    here = visit(stub.url)
    here.wait_until_ready()
    here.send("one")
    here.send("two")
    here.button("Retry").click()
    here.wait_until_idle()
    assert stub.bodies[-1]["messages"] == stub.bodies[-2]["messages"]
    assert here.said() == ["one", "an answer", "two", "an answer"]
    here.button("Edit").click()
    assert here.said() == ["one", "an answer"]
    assert here.find("#prompt").input_value() == "two"
    here.send("three")
    assert [message["content"] for message in stub.bodies[-1]["messages"]] == [
        "one", "an answer", "three",
    ]  # fmt: skip


def test_a_conversation_outlives_the_page_until_a_new_one_begins(
    visit: Visiting, stub: PageStub
) -> None:
    stub.say("an answer")
    here = visit(stub.url)
    here.wait_until_ready()
    here.send("one")
    here.page.reload()
    assert here.said() == ["one", "an answer"]
    here.button("New chat").click()
    here.page.reload()
    assert here.said() == []
    here.wait_until_ready()
    here.send("again")
    assert len(stub.bodies[-1]["messages"]) == 1


def test_keys(visit: Visiting, stub: PageStub) -> None:
    stub.answers = [[{"content": "one"}, {}]]
    here = visit(stub.url)
    here.wait_until_ready()
    keyboard = here.page.keyboard
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second")
    keyboard.press("Enter")
    here.find(".assistant > .content").filter(has_text="one").wait_for()
    assert stub.bodies[-1]["messages"] == [{"role": "user", "content": "first line\nsecond"}]
    keyboard.press("Escape")
    here.wait_until_idle()
    end = time.monotonic() + SECONDS
    while not stub.num_cut:
        assert time.monotonic() < end, "the request goes on"
        time.sleep(0.01)
    keyboard.press("ArrowUp")
    assert here.find("#prompt").input_value() == "first line\nsecond"


def test_errors_are_told_and_kept_out_of_the_history(visit: Visiting, stub: PageStub) -> None:
    here = visit(stub.url)
    here.wait_until_ready()
    here.accepted.append("status of 400")
    stub.refusal = (400, {"message": "temperature = 7: accepted: up to 2", "param": "temperature"})
    here.send("one")
    assert "temperature = 7: accepted: up to 2" in here.find(".assistant .error").inner_text()
    stub.refusal = None
    stub.say("now")
    here.button("Retry").click()
    here.wait_until_idle()
    assert here.said() == ["one", "now"]
    assert stub.bodies[-1]["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize("script", ["broken", "cut", "silent"])
def test_an_answer_that_breaks_off(visit: Visiting, stub: PageStub, script: str) -> None:
    stub.models = [script]
    here = visit(stub.url)
    here.accepted.append("ERR_INCOMPLETE_CHUNKED_ENCODING")
    here.wait_until_ready()
    here.find(f'#model option[value="{script}"]').wait_for(state="attached")
    here.send("go")
    # what came just before a connection is lost may be lost with it
    assert here.said()[1] in ({"half", ""} if script == "cut" else {"half"})
    told = here.find(".assistant .error").inner_text()
    assert ("the engine died" if script == "broken" else "connection was lost") in told


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Visiting, stub: PageStub) -> None:
    stub.api_key = "sesame"
    stub.say("open")
    here = visit(stub.url)
    here.accepted.append("status of 401")
    for key in ("wrong", "sesame"):
        here.find('#key input[name="key"]').fill(key)
        here.button("Use").click()
    here.find('#model option[value="scripted"]').wait_for(state="attached")
    here.send("hello")
    assert here.said() == ["hello", "open"]
    assert "sesame" not in here.page.evaluate("JSON.stringify(localStorage)")


def test_a_phone_shows_all_of_it(visit: Visiting, stub: PageStub) -> None:
    stub.say("word " * 200 + "x" * 500 + "\n```\n" + "y" * 500 + "\n```\n")
    here = visit(stub.url, **PHONE)
    here.wait_until_ready()
    here.send("z" * 300)
    assert here.page.evaluate(
        "[document.documentElement, document.getElementById('scroll')]"
        ".every((each) => each.scrollWidth <= 360)"
    )
    for control in ("#prompt", "#send", "#open-settings", "#clear"):
        box = here.find(control).bounding_box()
        assert box is not None
        assert box["x"] >= 0, control
        assert box["x"] + box["width"] <= 360, control
        assert box["height"] >= 24, control
