"""The middleware before all routes, where a route fails as none should."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.server.app import RequestMiddleware, build_app
from trueline.server.config import ServerConfig
from trueline.server.keys import Keys
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.not_offered import REFUSED
from trueline.server.protocol.openapi import OPEN, openapi


def answers(app: Any) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """What is sent, and what is counted."""
    sent: list[dict[str, Any]] = []
    counted: list[tuple[str, int]] = []
    metrics = SimpleNamespace(answered=lambda *given: counted.append(given))
    service: Any = SimpleNamespace(metrics=metrics, config=SimpleNamespace(max_body_bytes=10))
    middleware = RequestMiddleware(app, service, Keys([]), logging.getLogger("test"))

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [(b"x-request-id", b"me")]}
    asyncio.run(middleware(scope, receive, send))
    return sent, counted


def test_a_bug_is_a_500_with_an_id_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("secret")

    (start, body), counted = answers(broken)
    assert (start["status"], dict(start["headers"])[b"x-request-id"]) == (500, b"me")
    assert json.loads(body["body"])["error"]["type"] == "server_error"
    assert b"secret" not in body["body"]
    assert "KeyError" in caplog.text
    assert counted == [("other", 500)]


def test_a_bug_in_the_middle_of_an_answer_cuts_it() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("late")

    with pytest.raises(KeyError):
        answers(broken)


def test_who_leaves_before_an_answer_is_499() -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return

    assert answers(silent)[1] == [("other", 499)]


def test_the_document_has_the_routes_there_are() -> None:
    service: Any = SimpleNamespace(config=ServerConfig(page=False))
    app: Any = build_app(service, Keys(["k"]), logging.getLogger("test"))
    refused = {route.replace(":path", "") for route in REFUSED}
    routes = {route.path.replace(":path", "") for route in app.routes}
    assert refused <= routes
    routes -= refused
    document = openapi(RequestLimits(models=("m",), max_model_len=8, vocab_size=9))["paths"]
    assert routes - {"/openapi.json", "/docs"} == set(document)
    keyed = {
        path for path, methods in document.items() if "security" in next(iter(methods.values()))
    }
    assert keyed == routes - OPEN
    assert {path for path in routes if path.startswith("/v1/")} <= keyed


PRINTABLE = st.characters(min_codepoint=33, max_codepoint=126)


@given(
    keys=st.lists(
        st.text(PRINTABLE, min_size=1, max_size=120), min_size=1, max_size=3, unique=True
    ),
    which=st.integers(0, 2),
    place=st.integers(0, 120),
    letter=PRINTABLE,
)
def test_a_key_is_known_by_every_character(
    keys: list[str], which: int, place: int, letter: str
) -> None:
    """One changed, one more, one less, at any place: another key."""
    known, key = Keys(keys), keys[which % len(keys)]
    place = min(place, len(key))
    head, tail = key[:place], key[place:]
    others = {head + letter + tail, head + letter + tail[1:], head + tail[1:], key.swapcase(),
              key + key, "", key[: len(key) // 2]}  # fmt: skip
    assert known.admit(f"Bearer {key}".encode())
    for other in others - set(keys):
        assert not known.admit(f"Bearer {other}".encode()), "almost is not enough"
    for form in (key, f"Basic {key}", f"Bearer{key}", ""):
        assert not known.admit(form.encode())
    assert not known.admit(None)
