"""No request stops others, whatever it is made of.

Requests built to be expensive (`expensive.py`: every field that can be long at its limit and far
beyond it) are sent to a real server, whose event loop's heart must beat at least once in 100 ms of
its process's CPU time (`heartbeat.py`).
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import heartbeat
from expensive import (
    LANGUAGES,
    MAX_LEN,
    ROUTES,
    TOKENIZE_CHAT,
    VOCAB,
    Case,
    cases,
    field_cases,
    huge,
)
from heartbeat import Heart
from servers import Served, serving
from trueline.server.protocol.openapi import _REQUESTS
from wire import HttpResponse, Wire, request, wire

Tiny = Callable[..., Path]
LONGEST_GAP = 0.1
"""Seconds of CPU time."""
GROWTH = 8.0
"""Four times the bytes may cost four times as much, not sixteen times: half way on the scale."""
TRIES = 3
MUCH = 1 << 14
"""Bytes of a request that might hold up others."""
FLAGS = ("--max-model-len", str(MAX_LEN), "--trust-request-chat-template",
         "--tool-call-parser", "hermes")  # fmt: skip


@contextmanager
def beating(tiny: Tiny, file: Path) -> Iterator[tuple[Served, Heart]]:
    model = tiny("deepseek_v3", keys={"vocab_size": VOCAB})
    heart = Heart(file)
    with serving(model, *FLAGS, launch=(heartbeat.__file__, str(file))) as served:
        heart.rest()
        yield served, heart


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Heart]]:
    with beating(tiny, tmp_path_factory.mktemp("heart") / "beats") as found:
        yield found


def post(served: Served, path: str, body: bytes) -> HttpResponse:
    with wire(served.url) as connection:
        connection.socket.settimeout(600)
        connection.send(request("POST", path, body))
        return connection.answer()


class Stream:
    """Tokens that keep coming, whatever others ask."""

    def __init__(self, served: Served) -> None:
        self.frames, self._ended, self._served = 0, False, served
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        asked = {"prompt": "x", "max_tokens": MAX_LEN - 64, "ignore_eos": True, "stream": True}
        while not self._ended:
            connection = Wire(self._served.url, 600)
            connection.send(request("POST", "/v1/completions", json.dumps(asked).encode()))
            while not self._ended and b"[DONE]" not in connection.rest and connection._more():
                self.frames += connection.rest.count(b"data: ")
                connection.rest = connection.rest[-7:]
            connection.close()

    def end(self) -> None:
        self._ended = True
        self._thread.join()


def check(answer: HttpResponse, case: Case) -> None:
    if case.beyond:
        assert answer.status == 400, (case.name, answer.body[:300])
        assert len(answer.body) < 5000
        for word in case.says:
            assert word in answer.error["message"], (case.name, word, answer.error)
    elif answer.status != 200:  # for what is no limit of its own
        known = answer.error["code"] in ("context_length_exceeded", "model_not_found")
        known |= answer.error["param"] in (*LANGUAGES, "reasoning_effort", "tools")
        assert known or "is not offered yet" in answer.error["message"], answer.error


def gap(served: Served, heart: Heart, case: Case, share: float) -> tuple[float, float]:
    """The worst one, and what the request cost."""
    body, answers = case.body(share), []
    found = heart.measured(lambda: answers.append(post(served, case.path, body)))
    check(answers[0], case)
    return found


def test_every_body_is_covered() -> None:
    assert {*ROUTES.values(), TOKENIZE_CHAT} == set(_REQUESTS)
    fields = set(TOKENIZE_CHAT.__struct_fields__)
    others = [body.__struct_fields__ for body in ROUTES.values()]
    assert fields <= {name for names in others for name in names}
    for kind in (str, list[int], dict[str, int] | None, Any):
        with pytest.raises(AssertionError, match="no limit"):
            list(field_cases("/v1/completions", "added_later", kind))


def test_the_heart_beats(server: tuple[Served, Heart]) -> None:
    """And a request's cost grows no faster than its bytes, and the tokens of others keep coming."""
    served, heart = server
    smallest = Case("smallest", "/detokenize", lambda share: b'{"tokens": [1]}')
    fixed = max(gap(served, heart, smallest, 1)[1] for _ in range(TRIES))
    found: dict[str, str] = {}
    for case in cases():
        worst, cost = gap(served, heart, case, 1)
        for _ in range(TRIES - 1):
            if worst < LONGEST_GAP:
                break
            again, cheaper = gap(served, heart, case, 1)
            worst, cost = min(worst, again), min(cost, cheaper)
        if worst >= LONGEST_GAP:
            found[case.name] = f"no beat in {worst:.3f} s"
        elif case.fills and not case.beyond:
            _, quarter = gap(served, heart, case, 0.25)
            if cost > GROWTH * (quarter + fixed):
                cost = min(gap(served, heart, case, 1)[1] for _ in range(TRIES))
            if cost > GROWTH * (quarter + fixed):
                found[case.name] = f"{cost:.3f} s, a quarter of it {quarter:.3f} s"
    assert not found


@pytest.mark.slow
def test_the_heart_beats_for_the_largest_bodies(server: tuple[Served, Heart]) -> None:
    served, heart = server
    gaps = {case.name: min(gap(served, heart, case, 1)[0] for _ in range(TRIES)) for case in huge()}
    assert max(gaps.values()) < LONGEST_GAP, gaps


def test_tokens_keep_coming(server: tuple[Served, Heart]) -> None:
    """Of a stream, while others ask for as much as they may: what is beyond is refused sooner."""
    served, heart = server
    stream = Stream(served)
    try:
        for case in (case for case in cases() if not case.beyond and len(case.body(1)) > MUCH):
            seen = stream.frames
            _, cost = gap(served, heart, case, 1)
            assert cost < LONGEST_GAP or stream.frames > seen, case.name
        assert stream.frames
    finally:
        stream.end()


def test_two_signals_end_it(tiny: Tiny, tmp_path: Path) -> None:
    """At any time; here while it has the most to do."""
    many = {"prompt": "a", "bad_words": [f"w{i}" for i in range(60_000)]}
    long = {"prompt": "true to the line " * 60_000}
    template = {"messages": [{"role": "user", "content": "a"}],
                "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}"
                                 "{% endfor %}{% endfor %}"}  # fmt: skip
    with beating(tiny, tmp_path / "beats") as (served, _):
        connections = [Wire(served.url) for _ in range(3)]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", template), ("/tokenize", long), ("/v1/completions", many),
        ]  # fmt: skip
        for connection, (path, body) in zip(connections, asked, strict=True):
            connection.send(request("POST", path, json.dumps(body).encode()))
        served.signal(signal.SIGTERM)
        served.wait_for("draining")
        served.signal(signal.SIGTERM)
        assert served.ended() in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
        for connection in connections:
            connection.close()
