"""What a client sends is read by nobody but the model: no log quotes it, and no refusal returns
more of it than a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inside import Inside
from trueline.server.protocol.bodies import FIELDS

Tiny = Callable[..., Path]
MARK = "XsecretX"
LINE = 700
"""Characters of a log line, and of a refusal, without what a client has sent."""
REFUSAL = 1600
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": MARK, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": MARK}], "max_tokens": 1},
    "/tokenize": {"prompt": MARK},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module", params=["text", "json"])
def inside(request: pytest.FixtureRequest, tiny: Tiny) -> Inside:
    return Inside(
        tiny("deepseek_v3"),
        log_format=request.param,
        max_model_len=64,
        trust_request_chat_template=True,
    )


def logged(inside: Inside) -> str:
    text = inside.log.getvalue()
    inside.log.seek(0)
    inside.log.truncate()
    return text


def shapes(mark: str) -> list[Any]:
    """Right and wrong ones for every field there is."""
    part = {"type": "text", "text": mark}
    return [
        mark, [mark], [[mark]], {mark: mark}, {mark: 1}, [mark, 1], {"type": mark},
        {"include_usage": mark}, {mark: {mark: [mark]}}, [{"type": "function", mark: mark}],
        *([message] for message in (
            mark, {"role": mark, "content": mark}, {"role": mark}, {mark: mark},
            {"role": "user", "content": {"text": mark}},
            {"role": "user", "content": [{"type": mark}]},
            {"role": "user", "content": [{"type": "text", "txt": mark}]},
            {"role": "user", "content": [{"text": mark}]},
            {"role": "user", "content": [part, [mark]]},
            {"role": "user", "content": [part, 5, mark]},
            {"role": {mark: 1}, "content": mark},
            {"role": "robot", "content": mark},
            {"role": "user", "content": mark, "name": [mark] * 3},
        )),
        "{{ raise_exception(messages[0].content) }}",
        "{{ {}[messages[0].content] }}{{ messages[0].content.x.y }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0][messages[0].content].z }}",
        "{% " + mark + " %}",
    ]  # fmt: skip


def check(inside: Inside, path: str, body: Any, mark: str, **headers: str) -> None:
    heard = inside.ask(path, body, headers=headers)
    log = logged(inside)
    assert MARK not in log, log
    assert all(len(line) < LINE for line in log.splitlines()), "a line of any length"
    if heard.status >= 400:
        assert len(heard.body) < REFUSAL, "a refusal of any length"


@given(
    path=st.sampled_from(sorted(BASES)),
    field=st.sampled_from([*sorted(FIELDS), MARK, "unknown", f"{MARK}.x[1]"]),
    shape=st.integers(0, len(shapes("")) - 1),
    times=st.sampled_from([1, 1, 1, 20_000]),
)
def test_no_field_is_quoted(inside: Inside, path: str, field: str, shape: int, times: int) -> None:
    mark = MARK * times
    name = mark if field == MARK else field
    check(inside, path, BASES[path] | {name: shapes(mark)[shape]}, mark)


@given(path=st.sampled_from(sorted(BASES)), end=st.integers(1, 80), extra=st.binary(max_size=3))
def test_no_broken_body_is_quoted(inside: Inside, path: str, end: int, extra: bytes) -> None:
    check(inside, path, json.dumps(BASES[path]).encode()[:end] + extra, MARK)


def test_nothing_is_quoted_whatever_it_is(inside: Inside) -> None:
    """Each field with each shape that is a template or a message, and what is no body at all."""
    for shape in shapes(MARK):
        for path in BASES:
            for field in ("messages", "chat_template", "prompt", "model", "stop", "tools"):
                check(inside, path, BASES[path] | {field: shape}, MARK)
    check(inside, "/v1/models", None, MARK, Authorization=f"Bearer {MARK}")
    check(inside, f"/v1/models/{'x' * 100_000}", None, "x")
    check(inside, f"/{'x' * 100_000}", None, "x")


def test_a_bug_tells_its_place_and_no_more(inside: Inside) -> None:
    async def broken(request: Request) -> Response:
        try:
            raise KeyError(MARK)
        except KeyError as error:
            raise ValueError(f"about {MARK}") from error

    application: Any = inside.app
    application.router.routes.insert(0, Route("/broken", broken))
    try:
        heard = inside.ask("/broken")
    finally:
        del application.router.routes[0]
    log = logged(inside)
    assert heard.status == 500
    assert MARK.encode() not in heard.body
    assert MARK not in log
    assert "KeyError" in log
    assert "ValueError" in log
    assert "test_server_privacy.py" in log, "where it was raised"


def test_the_log_tells_which_field_was_wrong(inside: Inside) -> None:
    for asked, said in [
        ({"temperature": -1}, ("invalid_request_error", "temperature")),
        ({"model": MARK}, ("model_not_found", "model")),
        ({"stop": ["", MARK]}, ("invalid_request_error", "stop")),
    ]:
        inside.ask("/v1/completions", BASES["/v1/completions"] | asked)
        log = logged(inside)
        assert all(word in log for word in said), log
