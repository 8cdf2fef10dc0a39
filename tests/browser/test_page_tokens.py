"""How sure the model was: the tokens of an answer, and the candidates of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from page_stub import PageStub
from servers import Served, serving
from visits import PHONE, Visit

Visiting = Callable[..., Visit]


def token(text: str, share: float, *others: tuple[str, float], rank: int = 1) -> dict[str, Any]:
    """Among the candidates where its rank is, else beside them."""
    top = [(text, share)] if rank == 1 else []
    top += others
    if 1 < rank <= len(top) + 1:
        top.insert(rank - 1, (text, share))
    listed = [
        {"token": name, "logprob": math.log(value), "bytes": list(name.encode())}
        for name, value in top
    ]
    own = {"token": text, "logprob": math.log(share), "bytes": list(text.encode())}
    return {"logprobs": {"content": [own | {"rank": rank, "top_logprobs": listed}]}}


ANSWER = [
    {"reasoning_content": "hm", **token("hm", 0.97, ("ok", 0.01))},
    {"content": "**Ber", **token("**Ber", 0.55, ("**Par", 0.3), ("**Lon", 0.1))},
    {"content": "lin**", **token("lin**", 0.08, (" ", 0.5), ("\n", 0.2), rank=17)},
    {"content": "\n\n", **token("\n\n", 0.2, ("<b>", 0.7), rank=2)},
    {"content": "<i>", **token("<i>", 0.0004, ("\u202ex", 0.9), rank=900)},
]


@pytest.fixture
def here(visit: Visiting, stub: PageStub) -> Visit:
    stub.answers = [ANSWER]
    found = visit(stub.url, settings={"tokens": True})
    found.wait_until_ready()
    found.send("go")
    return found


def shares(here: Visit) -> list[tuple[str, str]]:
    rows = here.find(".candidates li").all()
    return [
        (row.locator(".name").inner_text().removesuffix("\n(drawn)"),
         row.locator(".share").inner_text())
        for row in rows
    ]  # fmt: skip


def test_a_token_shows_what_else_was_likely(here: Visit, stub: PageStub) -> None:
    assert stub.bodies[-1]["logprobs"] is True
    assert stub.bodies[-1]["top_logprobs"] == 5
    here.button("Tokens").click()
    tokens = here.find(".list .token")
    assert tokens.all_inner_texts() == ["hm", "**Ber", "lin**", "↵↵\n", "<i>"]
    assert not here.find(".assistant > .content").is_visible()
    levels = [each.get_attribute("data-level") for each in tokens.all()]
    assert levels == ["0", "2", "4", "3", "4"]
    tokens.nth(1).click()
    assert shares(here) == [
        ("**Ber", "55.0 %"), ("**Par", "30.0 %"), ("**Lon", "10.0 %"), ("all others", "5.0 %"),
    ]  # fmt: skip
    assert "**Ber" in here.find(".candidates .drawn").inner_text()
    widths = here.find(".candidates .fill").evaluate_all(
        "(all) => all.map((e) => e.style.inlineSize)"
    )
    assert [round(float(each.removesuffix("%"))) for each in widths] == [55, 30, 10, 5]
    tokens.nth(2).click()
    assert shares(here)[2] == ("lin**", "8.0 %"), "beside the candidates"
    assert "number 17" in here.find(".candidates p").inner_text()
    assert here.find(".candidates .drawn .rank").inner_text() == "17"
    tokens.nth(3).click()
    assert [row[0] for row in shares(here)] == ["<b>", "↵↵", "all others"]
    tokens.nth(4).click()
    assert shares(here)[0] == ("\\u202ex", "90.0 %")
    assert shares(here)[1] == ("<i>", "< 0.1 %")
    here.button("Tokens").click()
    assert here.find(".assistant > .content").inner_text() == "Berlin\n\n<i>"


def test_by_keys_alone(here: Visit) -> None:
    here.button("Tokens").focus()
    keyboard = here.page.keyboard
    keyboard.press("Enter")
    here.find(".list .token").first.focus()
    for key, chosen in (("ArrowRight", 1), ("End", 4), ("ArrowRight", 4), ("ArrowLeft", 3),
                        ("Home", 0), ("Enter", 0)):  # fmt: skip
        keyboard.press(key)
        pressed = here.find(".list .token").evaluate_all(
            "(all) => all.map((each) => each.getAttribute('aria-pressed'))"
        )
        assert pressed == ["true" if i == chosen else "false" for i in range(5)]
    reached = here.find(".list .token").evaluate_all("(all) => all.map((each) => each.tabIndex)")
    assert reached == [0, -1, -1, -1, -1], "one stop of Tab, not five"
    assert here.find(".candidates").is_visible()


def test_an_answer_without_them_says_so_and_the_next_has_them(
    visit: Visiting, stub: PageStub
) -> None:
    stub.answers = [[{"content": "one"}], ANSWER]
    here = visit(stub.url)
    here.wait_until_ready()
    here.send("go")
    assert "logprobs" not in stub.bodies[-1]
    here.button("Tokens").click()
    here.find("#notice").filter(has_text="from now on").wait_for()
    assert not here.find(".tokens").is_visible()
    here.button("Retry").click()
    here.wait_until_idle()
    assert stub.bodies[-1]["logprobs"] is True
    here.button("Tokens").click()
    assert here.find(".list .token").count() == 5
    here.page.reload()
    here.button("Tokens").click()
    assert here.find(".list .token").count() == 5, "they are kept with the conversation"


def test_they_come_while_it_answers(visit: Visiting, stub: PageStub) -> None:
    stub.answers = [[ANSWER[0], ANSWER[1], {}, *ANSWER[2:]]]
    here = visit(stub.url, settings={"tokens": True})
    here.wait_until_ready()
    here.find("#prompt").fill("go")
    here.button("Send").click()
    here.find(".assistant > .content").filter(has_text="Ber").wait_for()
    here.button("Tokens").click()
    here.find(".list .token").nth(1).click()
    assert here.find(".list .token").count() == 2
    stub.holding = False
    here.wait_until_idle()
    assert here.find(".list .token").count() == 5
    assert here.find(".list .token").nth(1).get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_has_room_for_it(visit: Visiting, stub: PageStub, theme: str) -> None:
    stub.answers = [[token("x" * 400, 0.5, ("y" * 300, 0.2)) | {"content": "x" * 400}, *ANSWER]]
    here = visit(stub.url, settings={"tokens": True, "theme": theme}, **PHONE)
    here.wait_until_ready()
    here.send("go")
    here.button("Tokens").tap()
    here.find(".list .token").first.tap()
    assert here.find(".candidates").is_visible()
    assert here.page.evaluate(
        "[document.documentElement, document.getElementById('scroll')]"
        ".every((each) => each.scrollWidth <= 360)"
    )


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Path("witness-v3")) as server:
        yield server


def test_a_model_tells_them(visit: Visiting, served: Served) -> None:
    here = visit(served.url, settings={"temperature": "0", "tokens": True})
    here.wait_until_ready()
    here.send("Tom has 3 apples and buys 4 more.")
    said = here.said()[1]
    here.button("Tokens").click()
    tokens = here.find(".list .token")
    spelled = "".join(tokens.all_inner_texts()).replace("␣", " ")
    assert spelled.startswith(said[:5])
    tokens.nth(1).click()
    assert here.find(".candidates .drawn .rank").inner_text() == "1", "greedy"
    assert len(shares(here)) >= 5
