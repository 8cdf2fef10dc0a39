"""Clients against a scripted server: what they show, count and measure, and how they fail."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stub_server import FIRST, GAP, STATUSES, TEXT, Stub, stub_server
from trueline.cli.chat import _converse, _doubt_long_conversation, _is_model
from trueline.client import measure
from trueline.client.endpoint import endpoint
from trueline.client.figures import PERCENTILES, doubts, spread, summary
from trueline.client.live import Screen
from trueline.client.load import Load, Shape
from trueline.client.measure import Bench
from trueline.client.record import Record
from trueline.client.response import StreamedResponse, gather
from trueline.client.session import ChatSession
from trueline.client.sse import Events
from trueline.client.stream import Connection, ConnectionPool
from trueline.client.wire import (
    Chunk,
    ResponseChoice,
    ServerError,
    TokenUsage,
    read_chunk,
    said_in,
)
from trueline.errors import UsageError

Run = Callable[..., tuple[int, str, str]]
KEY = "sk-of-a-test"


@pytest.fixture(scope="module")
def running() -> Iterator[Stub]:
    with stub_server() as stub:
        yield stub


@pytest.fixture
def stub(running: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    for name in ("TRUELINE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    running.models = ["paced"]
    running.most_in_flight = 0
    for seen in (running.bodies, running.keys, running.arrivals):
        seen.clear()
    return running


# -- events and HTTP off the wire ------------------------------------------------------

WIRE = (
    "\ufeff: a comment\r\n\r\ndata: one\n\n\n\n: ping\n\nevent: x\r\ndata: two\r\ndata:lines\r\n"
    'id: 7\r\n\r\nretry: 3\n\ndata: {"text":"日本 🙂"}\n\ndata\n\ndata: \n\ndata: [DONE]\n'
).encode()
EVENTS = [b"one", b"two\nlines", '{"text":"日本 🙂"}'.encode(), b"", b"", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_events_cut_anywhere(size: int) -> None:
    events = Events()
    chunks = (WIRE[i : i + size] for i in range(0, len(WIRE), size))
    assert [data for chunk in chunks for data in events.feed(chunk)] + events.end() == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_end_in_three_ways(end: bytes, size: int) -> None:
    wire = end.join((b"data: one", b"", b"data: two", b"data: lines", b"", b"data: three", b""))
    events = Events()
    chunks = (wire[i : i + size] for i in range(0, len(wire), size))
    found = [data for chunk in chunks for data in events.feed(chunk)] + events.end()
    assert found == [b"one", b"two\nlines", b"three"]


def test_an_event_comes_as_soon_as_it_is_whole() -> None:
    events = Events()
    assert events.feed(b"data: a\n\ndata: b") == [b"a"]
    assert events.feed(b"\r") == []
    assert events.feed(b"\n\r\n") == [b"b"]


class Seen:
    def __init__(self) -> None:
        self.status: Any = None
        self.body = b""

    def head(self, status: int, reason: str, headers: dict[bytes, bytes]) -> None:
        self.status = (status, reason, headers.get(b"x-a"))

    def data(self, chunk: bytes) -> None:
        self.body += chunk


CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhe\r\no\r\nA;ext=1\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nx-a:2\r\nContent-Length: 4\r\n\r\nnone"
EMPTY = b"HTTP/1.1 503 \r\ncontent-length: 0\r\n\r\n"
TO_END = b"HTTP/1.0 200 OK\r\n\r\nall of it"


@pytest.mark.parametrize(
    ("wire", "status", "body", "reusable"),
    [
        (CHUNKED, (200, "OK", b"1"), b"he\r\no0123456789", True),
        (SIZED, (404, "Not Found", b"2"), b"none", True),
        (EMPTY, (503, "", None), b"", True),
        (TO_END, (200, "OK", None), b"all of it", False),
        (SIZED.replace(b"x-a:2", b"Connection: Close"), (404, "Not Found", None), b"none", False),
    ],
)
def test_http_cut_anywhere(wire: bytes, status: Any, body: bytes, reusable: bool) -> None:
    async def feed(first: int, second: int) -> None:
        sent: list[bytes] = []
        transport: Any = SimpleNamespace(
            write=sent.append, is_closing=lambda: False, abort=lambda: None
        )
        connection, seen = Connection(), Seen()
        connection.connection_made(transport)
        done = connection.send(b"GET", seen)
        for part in (wire[:first], wire[first:second], wire[second:]):
            if part:
                assert not done.done()
                connection.data_received(part)
        if wire is TO_END:
            connection.connection_lost(None)
        assert done.done()
        await done
        assert (seen.status, seen.body, connection.reusable) == (status, body, reusable)
        assert sent == [b"GET"]

    async def all_cuts() -> None:
        for first, second in itertools.combinations(range(1, len(wire) + 1), 2):
            await feed(first, second)

    asyncio.run(all_cuts())


@pytest.mark.parametrize(
    ("wire", "kind"),
    [(b"SSH-2.0-x\r\n\r\n", "not understood"),
     (CHUNKED.replace(b"5\r\n", b"4\r\n"), "not understood"),
     (CHUNKED[:-9], "cut off"), (SIZED[:-1], "cut off")],
)  # fmt: skip
def test_http_that_is_wrong(wire: bytes, kind: str) -> None:
    async def feed() -> None:
        connection = Connection()
        connection.connection_made(
            SimpleNamespace(write=len, is_closing=lambda: False, abort=lambda: None)  # type: ignore[arg-type]
        )
        done = connection.send(b"GET", Seen())
        connection.data_received(wire)
        if not done.done():
            connection.connection_lost(None)
        with pytest.raises(ServerError) as caught:
            await done
        assert caught.value.kind == kind
        assert not connection.reusable

    asyncio.run(feed())


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    """A request that nobody answered goes out again; one answered half does not."""
    answered = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        await reader.readuntil(b"\r\n\r\n")
        answered += 1
        writer.write(SIZED if answered < 3 else SIZED[:-1])
        await writer.drain()
        if answered < 3:
            await reader.read(1)  # the next request is swallowed
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            pool = ConnectionPool(endpoint(f"127.0.0.1:{port}"))
            for _ in range(2):
                seen = Seen()
                await pool.ask(pool.request("x", b""), seen)
                assert seen.body == b"none"
            assert (answered, pool.opened) == (2, 2)
            with pytest.raises(ServerError, match="broke off"):
                await pool.ask(pool.request("x", b""), Seen())
            assert (answered, pool.opened) == (3, 3)
            pool.close()

    asyncio.run(ask())


# -- addresses, keys, models -----------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "base"),
    [("localhost:8000", "http://localhost:8000/v1"), ("http://a/", "http://a/v1"),
     ("http://a/v1", "http://a/v1"), ("https://a:1/x/v1/", "https://a:1/x/v1"),
     ("http://a/api", "http://a/api/v1"), ("http://a/v4", "http://a/v4"),
     ("http://[::1]:80", "http://[::1]:80/v1")],
)  # fmt: skip
def test_addresses(typed: str, base: str) -> None:
    assert endpoint(typed).base == base


@pytest.mark.parametrize(
    "typed", ["", "ftp://a", "http://", "http://a:x", "http://a?b=1", "./a", "http://a..b"]
)
def test_what_is_no_address(typed: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        endpoint(typed)


def test_a_password_in_the_address_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        endpoint("http://me:hunter2@a")
    assert "hunter2" not in str(caught.value)


def test_the_key_is_sent_and_never_shown(
    stub: Stub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\nanother\n")
    ask = ("complete", stub.url, "--prompt", "x", "--max-tokens", 2)
    assert run(*ask)[0] == 0
    assert set(stub.keys) == {None}
    for variable, more in (
        (None, ("--api-key-file", file)),
        ("TRUELINE_API_KEY", ()),
        ("OPENAI_API_KEY", ()),
    ):
        stub.keys.clear()
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, KEY)
            code, out, err = run(*ask, *more)
            # This stub quotes the key that it refuses.
            refused = run(*ask, *more, "--model", 401)
            loaded = run("bench", "serve", stub.url, *more, "--model", 401)
            helped = run("complete", "--help")
        assert (code, refused[0], loaded[0]) == (0, 1, 1)
        assert set(stub.keys) == {f"Bearer {KEY}"}
        assert "wrong key (key Bearer [the key])" in refused[2]
        assert "wrong key (key Bearer [the key])" in loaded[2]
        assert KEY not in "".join((out, err, *refused[1:], *loaded[1:], *helped[1:]))
    assert KEY not in repr(endpoint("a", KEY))
    file.write_text("\n")
    assert run(*ask, "--api-key-file", file)[0] == 2


def test_the_only_model_is_taken(stub: Stub, run: Run) -> None:
    ask = ("complete", stub.url, "--prompt", "x")
    assert run(*ask)[0] == 0
    assert stub.bodies[-1]["model"] == "paced"
    stub.models = ["one", "two"]
    for verb in (ask, ("chat", stub.url, "--message", "x"), ("bench", "serve", stub.url)):
        code, _, err = run(*verb)
        assert code == 2
        assert "give --model; the server has: one, two" in err
    stub.models = []
    assert "the server has: none" in run(*ask)[2]


# -- complete --------------------------------------------------------------------------


def test_complete_streams_text(stub: Stub, run: Run) -> None:
    code, out, err = run("complete", stub.url, "--prompt", "x", "--max-tokens", 6)
    assert (code, out) == (0, "t0 t1 t2 t3 t4 t5 \n")
    found = re.fullmatch(
        r"first token after ([\d.]+) s, then ([\d.]+) tokens/s, "
        r"1 \(1 of them cached\) \+ 6 tokens, ended by length\n",
        err,
    )
    assert found
    assert float(found[1]) >= FIRST
    assert float(found[2]) > 0
    body = stub.bodies[0]
    assert body == {"model": "paced", "prompt": "x", "max_tokens": 6, "stream": True,
                    "stream_options": {"include_usage": True}}  # fmt: skip


def test_complete_sends_what_is_asked(stub: Stub, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("from a file\n")
    code, out, _ = run(
        "complete", stub.url, "--prompt-file", file, "--temperature", 0, "--top-k", 3, "--stop",
        "a", "--stop", "b", "--ignore-eos", "--seed", 0, "--no-stream", "--field",
        'logit_bias={"5": 1}', "--field", "user=me", "--json",
    )  # fmt: skip
    assert code == 0
    assert stub.bodies[-1] == {
        "model": "paced", "prompt": "from a file\n", "max_tokens": 64, "temperature": 0,
        "top_k": 3, "stop": ["a", "b"], "ignore_eos": True, "seed": 0, "logit_bias": {"5": 1},
        "user": "me",
    }  # fmt: skip
    found = json.loads(out)
    assert (found["text"], found["tokens"], found["finish_reason"]) == (TEXT, 9, "stop")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "cached_tokens": 1}


@pytest.mark.parametrize("script", ["split", "whole"])
@pytest.mark.parametrize("verb", [("complete", "--prompt"), ("chat", "--message")])
def test_text_survives_every_cut(stub: Stub, run: Run, verb: tuple[str, str], script: str) -> None:
    code, out, _ = run(verb[0], stub.url, verb[1], "x", "--model", script, "--quiet")
    assert (code, out) == (0, TEXT + "\n")


def test_tokens_that_nobody_counted(stub: Stub, run: Run) -> None:
    ask = ("complete", stub.url, "--prompt", "x", "--model", "uncounted")
    assert "about 3 tokens (the server did not count)" in run(*ask)[2]
    assert json.loads(run(*ask, "--json")[1])["tokens_counted_by"] == "frames"


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("verb", [("complete", "--prompt"), ("chat", "--message")])
def test_refusals_in_the_servers_words(
    stub: Stub, run: Run, verb: tuple[str, str], status: int
) -> None:
    code, out, err = run(verb[0], stub.url, verb[1], "x", "--model", status)
    assert (code, out.strip()) == (1, "")
    assert re.search(rf"trueline: {status} [A-Z].*: {STATUSES[status]}", err)
    assert ("retry after 7 s" in err) == (status == 429)


@pytest.mark.parametrize(
    ("script", "words"),
    [("broken", "the server broke off: the engine died"), ("cut", "the connection broke off"),
     ("silent", "the stream ended before the answer did")],
)  # fmt: skip
def test_answers_that_break_off(stub: Stub, run: Run, script: str, words: str) -> None:
    code, out, err = run("complete", stub.url, "--prompt", "x", "--model", script)
    assert (code, out) == (1, "half\n")
    assert words in err


def test_no_server_and_wrong_use(stub: Stub, run: Run) -> None:
    code, _, err = run("complete", "http://127.0.0.1:9", "--prompt", "x")
    assert code == 1
    assert "no connection" in err
    text = ("--prompt", "x")
    for wrong in ((*text, "--prompt-file", "y"), ("--prompt-file", "/no/such"),
                  (*text, "--field", "y"), (*text, "--timeout", "0"),
                  (*text, "--timeout", "nan"), (*text, "--timeout", "inf")):  # fmt: skip
        assert run("complete", stub.url, *wrong)[0] == 2
    slow = run("complete", stub.url, "--prompt", "x", "--model", "slow", "--timeout", 0.2)
    assert slow[0] == 1
    assert "no answer in time" in slow[2]


@pytest.mark.parametrize(
    ("body", "said"),
    [(b'{"error":{"message":"a"}}', "a"), (b'{"error":"a"}', "a"), (b'{"message":"a"}', "a"),
     (b'{"detail":[{"loc":1}]}', '[{"loc":1}]'), (b"<p>", "<p>"), (b"", None)],
)  # fmt: skip
def test_every_shape_of_error(body: bytes, said: str | None) -> None:
    assert said_in(body) == said


def test_chunks_that_are_errors() -> None:
    for data in (b'{"object":"error","message":"m"}', b'{"error":{"message":"m"}}'):
        with pytest.raises(ServerError, match="m") as caught:
            read_chunk(data)
        assert caught.value.kind == "error in the stream"
    with pytest.raises(ServerError, match="an answer that is none"):
        read_chunk(b'{"choices":[{"text"')


# -- chat ------------------------------------------------------------------------------


def test_chat_of_several_lines(
    stub: Stub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "saved.json"
    lines = ["one", "", "two", f"/save {file}", "/system be brief", "/reset", "//three", "/quit",
             "never"]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code, out, err = run(
        "chat", stub.url, "--system", "s", "--max-tokens", 2, "--template-kwargs",
        "enable_thinking=false", "--template-kwargs", "style=dry", "--temperature", 0,
    )  # fmt: skip
    assert (code, out) == (0, "t0 t1 \n" * 3)
    first, second, third = stub.bodies
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "style": "dry"}
    assert (first["temperature"], first["max_tokens"]) == (0, 2)
    said = [(each["role"], each["content"]) for each in second["messages"]]
    assert said == [("system", "s"), ("user", "one"), ("assistant", "t0 t1 "), ("user", "two")]
    assert third["messages"] == [{"role": "system", "content": "be brief"},
                                 {"role": "user", "content": "/three"}]  # fmt: skip
    assert [each["content"] for each in json.loads(file.read_text())] == [
        "s", "one", "t0 t1 ", "two", "t0 t1 "]  # fmt: skip
    assert "(5 messages written" in err
    assert err.count("tokens/s") == 3


def test_calls_of_tools(
    stub: Stub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are shown, and the next messages are what they found."""
    stub.models = ["calls"]
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "look"}}]')
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nblue\n\nthanks\n"))
    code, out, err = run("chat", stub.url, "--tools", tools)
    assert code == 0
    assert out == (
        'calls look {"a":1}\ncalls now {"a":1}\ncalls no {"a":1}no\nblue and \nblue and \n'
    )
    assert "(what did look find?)" in err
    assert "(what did now find?)" in err
    first, second, third = stub.bodies
    assert first["tools"] == json.loads(tools.read_text())
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    user, said, *found = second["messages"]
    assert (user["content"], said["tool_calls"][0], len(said["tool_calls"])) == ("hi", call, 2)
    assert found == [{"role": "tool", "tool_call_id": "c0", "content": "blue"},
                     {"role": "tool", "tool_call_id": "c1", "content": ""}]  # fmt: skip
    assert third["messages"][-1] == {"role": "user", "content": "thanks"}
    code, out, _ = run("chat", stub.url, "--message", "hi", "--json", "--quiet")
    assert json.loads(out)["tool_calls"][0] == call
    for text in ("{}", "["):
        tools.write_text(text)
        code, _, err = run("chat", stub.url, "--tools", tools, "--message", "hi")
        assert (code, f"--tools {tools}" in err) == (2, True)


def test_messages_of_the_command_line(stub: Stub, run: Run) -> None:
    code, out, err = run(
        "chat", stub.url, "--message", "a", "--message", "b", "--json", "--quiet", "--max-tokens", 1
    )
    assert (code, err) == (0, "")
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["t0 ", "t0 "]
    assert len(stub.bodies[1]["messages"]) == 3


def test_a_stopped_answer_leaves_the_session(
    stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = ChatSession(endpoint(stub.url), {"model": "paced", "stream": True}, None)
    show, shown = Screen.show, []

    def interrupted(self: Screen, answer: StreamedResponse, chunk: Chunk) -> None:
        shown.append(chunk)
        if len(shown) == 3:
            raise KeyboardInterrupt
        show(self, answer, chunk)

    monkeypatch.setattr(Screen, "show", interrupted)
    assert _converse(talk, iter(["one", "two", "/nonsense"]), True, False, True) == 0
    assert [each["content"] for each in talk.turns] == ["one", "t0 t1 t2 ", "two",
                                                        "t0 t1 t2 t3 t4 "]  # fmt: skip
    out, err = capsys.readouterr()
    assert "(stopped)" in err
    assert "/nonsense is none of these" in err
    assert out == "t0 t1 \nt0 t1 t2 t3 t4 \n"
    shown.clear()
    with pytest.raises(KeyboardInterrupt):
        _converse(talk, iter(["one"]), False, False, True)


def test_a_turn_that_fails_never_was(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    talk = ChatSession(endpoint(stub.url), {"model": "503", "stream": True}, None)
    assert _converse(talk, iter(["one"]), True, False, True) == 0
    assert talk.turns == []
    assert "draining" in capsys.readouterr().err
    with pytest.raises(ServerError):
        _converse(talk, iter(["one"]), False, False, True)


def test_what_was_meant_as_a_model_is_no_host(tmp_path: Path, run: Run) -> None:
    for model in ("witness-ling", "witness-lin", "./witness-ling", str(tmp_path)):
        assert _is_model(model)
    for address in ("127.0.0.1:8000", "http://127.0.0.1:8000/v1", "localhost", "gpu-box/v1"):
        assert not _is_model(address)
    code, _, err = run("chat", tmp_path, "--model", "witness-ling", "--message", "x")
    assert code == 2
    assert "so is --model witness-ling: give one" in err


def test_a_conversation_that_is_too_long_can_begin_anew(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "strict", "stream": True, "return_token_ids": True}  # a 400
    talk = ChatSession(endpoint(stub.url), body, None)
    assert _converse(talk, iter(["one"]), True, False, True) == 0
    assert "/reset" not in capsys.readouterr().err
    talk.turns = [{"role": "user", "content": "x"}]
    assert _converse(talk, iter(["one"]), True, False, True) == 0
    assert "(/reset begins a new conversation)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "tokens", "doubtful"),
    [("witness-ling", 1024, False), ("witness-ling", 1025, True), ("other", 9999, False)],
)
def test_what_a_built_in_model_was_not_trained_on_is_told(
    model: str, tokens: int, doubtful: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _doubt_long_conversation(StreamedResponse(model=model, usage=TokenUsage(tokens - 5, 5)))
    err = capsys.readouterr().err
    assert ("trained on up to 1,024; /reset begins a new one" in err) == doubtful


# -- the terminal ----------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize(("out_tty", "err_tty"), [(True, True), (False, True), (False, False)])
def test_speed_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, out_tty: bool, err_tty: bool
) -> None:
    out, err = Terminal(out_tty), Terminal(err_tty)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("trueline.client.live.SECONDS_BETWEEN", -1.0)
    screen = Screen()
    chunks = [Chunk(choices=[ResponseChoice(text=text)]) for text in ("one ", "t\x1b[2Jwo")]
    with screen.answering():
        gather(chunks, StreamedResponse(), screen.show)
    # A model must not steer the terminal; a file gets what came.
    assert out.getvalue() == ("one t[2Jwo" if out_tty else "one t\x1b[2Jwo")
    status = err.getvalue()
    assert ("2 tokens, " in status) == err_tty
    assert ("\x1b[1;23r" in status) == (out_tty and err_tty)
    if out_tty:
        assert "\x1b[r" in status.split("2 tokens, ")[1]  # the terminal gets its last row back
    assert bool(status) == err_tty


# -- load: what and when ---------------------------------------------------------------


def test_the_same_load_for_every_server() -> None:
    shape = Shape(32, 4, 311, seed=5)
    prompts = [shape.prompt(point, i) for point in ("8 at once", "2 req/s") for i in range(20)]
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert shape.prompt("8 at once", 3) == prompts[3]
    assert shape.prompt("8 at once", 3) != Shape(32, 4, 311, seed=6).prompt("8 at once", 3)
    assert {len(prompt) for prompt in prompts} == {32}
    assert 0 <= min(map(min, prompts)) < max(map(max, prompts)) < 311
    body = json.loads(shape.body("m", "8 at once", 3, token_ids=True))
    assert (body["prompt"], body["ignore_eos"], body["temperature"]) == (prompts[3], True, 0)


def test_arrivals_are_poisson_and_seeded() -> None:
    times = list(Load(rate=50.0, num_requests=4000).arrivals(1))
    assert times == list(Load(rate=50.0, num_requests=4000).arrivals(1))
    assert times != list(Load(rate=50.0, num_requests=4000).arrivals(2))
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    inside = list(Load(rate=50.0, duration=10.0).arrivals(1))
    assert inside == [time for time in times if time < 10.0]
    assert len(list(Load(rate=50.0, duration=10.0, num_requests=7).arrivals(1))) == 7


def test_percentiles_are_numpys() -> None:
    for count in (1, 2, 3, 100, 101):
        draw = random.Random(count)
        values = [draw.random() for _ in range(count)]
        found = spread(values)
        assert found is not None
        for percent in PERCENTILES:
            wanted = np.percentile(values, percent) * 1e3
            assert found[f"p{percent}"] == pytest.approx(wanted, rel=1e-12)
        assert found["mean"] == pytest.approx(np.mean(values) * 1e3)
    assert spread([]) is None


# -- bench serve -----------------------------------------------------------------------


def bench(
    stub: Stub, *loads: Load, model: str = "paced", output_len: int = 11, timeout: float = 9
) -> list[dict[str, Any]]:
    """Points of a sweep, without the command line."""
    shape = Shape(4, output_len, 100, seed=3)

    async def work() -> list[dict[str, Any]]:
        runner = Bench(endpoint(stub.url, timeout=timeout), model, shape)
        await runner.warm_up(1)
        stub.arrivals.clear()
        points = [summary(await runner.run(load, lambda *_: None), shape) for load in loads]
        runner.close()
        return points

    return measure.run_loop(work())


def test_times_are_those_of_the_script(stub: Stub) -> None:
    """Never less than the script takes; how much more, the machine decides. Exact figures:
    test_figures.py."""
    for point in bench(stub, Load(1, num_requests=3), Load(4, num_requests=8)):
        assert point["errors"] == {}
        assert (point["output_tokens"], point["prompt_tokens"]) == (
            11 * point["requests"], 4 * point["requests"])  # fmt: skip
        assert point["ttft_ms"]["p50"] >= FIRST * 1e3
        whole = (FIRST + 10 * GAP) * 1e3
        assert whole <= point["e2e_ms"]["p50"] <= point["e2e_ms"]["max"]
        at_once = point["load"]["concurrency"]
        assert 0 < point["mean_in_flight"] <= at_once + 1e-9
        assert point["requests_per_s"] <= at_once * 1e3 / whole
        assert point["output_tokens_per_s"] == pytest.approx(11 * point["requests_per_s"])
        assert point["total_tokens_per_s"] == pytest.approx(15 * point["requests_per_s"])
        assert (point["tokens_counted_by"], point["gaps_between"]) == (["usage"], "tokens")
        assert (point["short_answers"], point["cached_tokens"]) == (0, point["requests"])
    assert stub.most_in_flight == 4


def test_an_open_loop_waits_for_nobody(stub: Stub) -> None:
    """None is answered before all have come: who waited for an answer would wait for ever."""
    load = Load(rate=60.0, num_requests=24)
    (point,) = bench(stub, load, model="together", output_len=24)
    assert point["succeeded"] == 24
    assert stub.most_in_flight == 24
    planned = list(load.arrivals(3))
    late = point["client"]["lag_ms"]["max"] / 1e3
    assert point["seconds"] + late >= planned[-1] - planned[0]


def test_a_client_that_lags_says_so(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.sleep

    async def late(seconds: float) -> None:
        await real(seconds + 0.02)

    monkeypatch.setattr(measure.asyncio, "sleep", late)
    (point,) = bench(stub, Load(rate=100.0, num_requests=10), output_len=1)
    assert point["client"]["lag_ms"]["mean"] > 20
    assert any("the client itself was late" in doubt for doubt in doubts(point))


def test_tokens_of_one_frame_have_nothing_between(stub: Stub) -> None:
    (point,) = bench(stub, Load(1, num_requests=2), model="bursts", output_len=6)
    assert (point["output_tokens"], point["tokens_counted_by"]) == (12, ["token_ids"])
    assert point["itl_ms"]["p50"] == 0
    assert point["itl_ms"]["max"] >= 0.9 * GAP * 1e3
    # 5 gaps a request: only the one between the frames takes time
    assert point["itl_ms"]["mean"] * 5 == pytest.approx(point["tpot_ms"]["mean"] * 5)
    assert not any("another length" in doubt for doubt in doubts(point))


def test_servers_that_list_or_count_no_tokens(stub: Stub) -> None:
    (point,) = bench(stub, Load(1, num_requests=1), model="strict")
    assert (point["gaps_between"], point["tokens_counted_by"]) == ("frames", ["usage"])
    assert any("lists no token ids" in doubt for doubt in doubts(point))
    (point,) = bench(stub, Load(1, num_requests=1), model="uncounted", output_len=4)
    assert (point["output_tokens"], point["tokens_counted_by"]) == (3, ["frames"])
    assert any("counts no tokens" in doubt for doubt in doubts(point))
    assert any("another length" in doubt for doubt in doubts(point))


def test_failures_are_counted_by_kind(stub: Stub) -> None:
    async def work() -> dict[str, Any]:
        shape = Shape(4, 2, 100, 0)
        runner = Bench(endpoint(stub.url), "flaky", shape)
        return summary(await runner.run(Load(1, num_requests=9), lambda *_: None), shape)

    point = asyncio.run(work())  # the plain loop, too
    assert (point["requests"], point["succeeded"], point["output_tokens"]) == (9, 3, 6)
    counts = {kind: error["count"] for kind, error in point["errors"].items()}
    assert counts == {"HTTP 429": 3, "cut off": 3}
    assert "the queue is full" in point["errors"]["HTTP 429"]["example"]
    assert point["e2e_ms"]["max"] >= FIRST * 1e3


@pytest.mark.parametrize(
    ("script", "kind"), [("broken", "error in the stream"), ("silent", "cut off"),
                         ("slow", "timeout")],
)  # fmt: skip
def test_kinds_of_failure(stub: Stub, script: str, kind: str) -> None:
    with pytest.raises(ServerError) as caught:
        bench(stub, model=script, timeout=0.3 if kind == "timeout" else 9)
    assert caught.value.kind == kind


def test_a_duration_ends_a_closed_loop(stub: Stub) -> None:
    (point,) = bench(stub, Load(2, duration=0.4))
    assert point["seconds"] >= 0.4 - 0.01  # from the first request, not from the start of the loop
    # 0.15 s each or more, two at once; those under way are finished
    assert 2 <= point["requests"] <= 6


def test_bench_serve_from_the_command_line(stub: Stub, run: Run, tmp_path: Path) -> None:
    out, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    code, printed, err = run(
        "bench", "serve", stub.url, "--concurrency", 1, "--concurrency", 2, "--rate", 50,
        "--num-requests", 4, "--output-len", 3, "--prompt-len", 8, "--out", out, "--plot", plot,
    )  # fmt: skip
    assert code == 0
    assert "warming up" in err
    assert "between tokens   1 at once" in printed
    figures = json.loads(out.read_text())
    assert (figures["model"], figures["prompt_len"], figures["output_len"]) == ("paced", 8, 3)
    names = [point["load"]["name"] for point in figures["points"]]
    assert names == ["1 at once", "2 at once", "50 req/s"]
    for point in figures["points"]:
        assert (point["requests"], point["succeeded"], point["output_tokens"]) == (4, 4, 12)
        assert set(point["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert plot.read_text().count('id="axes_') == 6  # two kinds of load, three panels each
    assert len(stub.bodies) == 1 + 3 * 4


def test_bench_serve_fails_with_its_requests(stub: Stub, run: Run) -> None:
    ask = ("bench", "serve", stub.url, "--model", "flaky", "--num-requests", 6, "--output-len", 2)
    # The warm-up succeeds: every third request does, from the first.
    code, printed, _ = run(*ask, "--json", "--concurrency", 1)
    assert code == 1
    assert json.loads(printed)["points"][0]["errors"]["cut off"]["count"] == 2
    for wrong in (["--concurrency", 0], ["--rate", 0], ["--rate", "nan"], ["--prompt-len", 0],
                  ["--num-requests", 0], ["--duration", 0], ["--warmup", 0],
                  ["--out", "/no/such/dir/x.json"]):  # fmt: skip
        assert run(*ask, *wrong)[0] == 2, wrong


def test_doubts_of_a_busy_client_and_a_warm_cache() -> None:
    record = Record(start=0.0, first=0.1, last=0.1, end=0.1, listed_tokens=1, finished=True)
    run = measure.LoadRun(Load(1), [record], seconds=1.0, cpu_seconds=0.95)
    point = summary(run, Shape(10, 1, 10, 0))
    assert doubts(point) == ["the client was busy: 95% of a core"]
    point |= {"cached_tokens": 8, "client": {"cpu": 0.1, "lag_ms": None}}
    assert [doubt[:24] for doubt in doubts(point)] == ["80% of the prompt tokens"]


# -- the house -------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["complete"], ["chat"], ["bench", "serve"]])
def test_help_is_fast(verb: list[str]) -> None:
    code = (
        "import sys\nfrom trueline.cli import main\n"
        f"try: main({[*verb, '--help']!r})\nexcept SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'httpx2', 'tokenizers', 'matplotlib', 'uvloop'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_clients_need_no_torch(stub: Stub) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom trueline.cli import main\n"
        f"main(['bench', 'serve', {stub.url!r}, '--num-requests', '1', '--output-len', '1'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
