"""The server when things go wrong: its engine, its start, its end, its clients."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servers import Served, serving
from wire import HttpResponse, Wire, events, request, wire

Tiny = Callable[..., Path]
ASK = {"prompt": "true to the", "temperature": 0, "max_tokens": 8}
LONG = {"prompt": "x", "temperature": 0, "max_tokens": 8000, "ignore_eos": True}
PATIENCE = 20.0
"""Seconds, for what takes far less on a machine that is not busy."""


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def posted(asked: dict[str, Any], **headers: str) -> bytes:
    return request("POST", "/v1/completions", json.dumps(asked).encode(), headers)


def ask(served: Served, asked: dict[str, Any] = ASK) -> HttpResponse:
    with wire(served.url) as connection:
        connection.send(posted(asked))
        return connection.answer()


def text(served: Served) -> str:
    found = ask(served)
    assert found.status == 200, found.body
    return json.loads(found.body)["choices"][0]["text"]


def begun(served: Served, **more: Any) -> Wire:
    """A stream whose first frame has come."""
    connection = Wire(served.url)
    connection.send(posted(LONG | {"stream": True} | more))
    while b"data: " not in connection.rest:
        assert connection._more()
    return connection


def metric(served: Served, name: str) -> float:
    return served.metric(f"trueline:{name}")


def is_idle(served: Served) -> bool:
    return metric(served, "num_requests_running") + metric(served, "num_requests_waiting") == 0


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def readiness(served: Served) -> tuple[int, dict[str, str]]:
    found = served.get("/health/ready")
    return found.status_code, found.json()


# -- the engine is lost --------------------------------------------------------------------


def hit(served: Served) -> tuple[list[HttpResponse], list[HttpResponse]]:
    """What streaming and other clients heard after their engine was killed."""
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, served, LONG) for _ in range(4)]
        streams = [begun(served) for _ in range(4)]
        eventually(lambda: metric(served, "num_requests_running") == 8)
        os.kill(served.engine_pid(), signal.SIGKILL)
        told = [pool.submit(connection.answer) for connection in streams]
        answers = [each.result() for each in told], [each.result() for each in others]
    for connection in streams:
        connection.close()
    return answers


def check_told(streamed: list[HttpResponse], others: list[HttpResponse]) -> None:
    for answer in streamed:
        *frames, last = events(answer.body)
        assert all("choices" in frame for frame in frames)
        assert last["error"]["type"] == "server_error", "and no [DONE] after it"
        assert "SIGKILL" in last["error"]["message"]
    for answer in others:
        assert answer.status == 503
        assert (answer.error["type"], answer.error["code"]) == ("server_error", "engine_dead")


def test_a_lost_engine_ends_the_server(tiny: Tiny) -> None:
    with serving(tiny("deepseek_v3")) as served:
        no_cors = served.get("/version", headers={"Origin": "http://page"})
        assert not [name for name in no_cors.headers if name.startswith("access-control")]
        check_told(*hit(served))
        assert served.ended() == 1
        log = served.rest_of_log()
    assert "engine lost" in log
    assert "Traceback" not in log


def test_a_lost_engine_is_started_again(tiny: Tiny) -> None:
    """A hybrid model: its states come back with its blocks."""
    with serving(tiny("bailing_moe_v2_5"), "--on-engine-death", "restart") as served:
        right = text(served)
        first, before = served.engine_pid(), descriptors(served.process.pid)
        check_told(*hit(served))
        status, told = readiness(served)
        assert (status, told["status"]) == (503, "loading")
        assert told["reason"]
        refused = ask(served)
        assert (refused.status, refused.error["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) >= 1
        assert metric(served, "engine_up") == 0
        eventually(lambda: readiness(served)[0] == 200)
        assert served.engine_pid() != first
        assert text(served) == right
        streams = [begun(served) for _ in range(3)]
        eventually(lambda: metric(served, "mamba_usage") > 0)
        for connection in streams:
            connection.close()
        eventually(lambda: is_idle(served))
        assert metric(served, "mamba_usage") == metric(served, "kv_cache_usage_perc") == 0
        eventually(lambda: descriptors(served.process.pid) <= before)
        assert "Traceback" not in "".join(served.log)


# -- the start -----------------------------------------------------------------------------


def test_nobody_reads_the_log(tiny: Tiny) -> None:
    """As in `trueline serve … 2>&1 | head -1`."""
    command = [sys.executable, "-m", "trueline", "serve", str(tiny("deepseek_v3")), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "http://" in line)
        process.stderr.close()
        found = re.search(r"http://[\d.:]+", line)
        assert found is not None
        served = Served(process, queue.Queue(), url=found[0])
        eventually(lambda: readiness(served)[0] == 200, 3 * PATIENCE)
        for _ in range(20):  # it ended soon after it was ready
            assert text(served)
            time.sleep(0.05)
        served.signal(signal.SIGTERM)
        assert served.ended() == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(tiny: Tiny, tmp_path: Path, number: signal.Signals) -> None:
    with serving(tiny("deepseek_v3"), wait=False, TMPDIR=str(tmp_path)) as served:
        eventually(lambda: "process.engine_process" in children(served.process.pid))
        served.signal(number)
        assert served.ended() == 0
        log = served.rest_of_log()
    assert "Traceback" not in log
    assert "never retrieved" not in log
    assert list(tmp_path.iterdir()) == []


def children(pid: int) -> str:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return "".join(Path(f"/proc/{child}/cmdline").read_text() for child in found)


def failing(*arguments: str) -> str:
    command = [sys.executable, "-m", "trueline", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_start_that_fails_says_why(tiny: Tiny, tmp_path: Path) -> None:
    model = str(tiny("deepseek_v3"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert failing(model, "--port", port) == (
            f"trueline: cannot listen on 127.0.0.1, port {port}: Address already in use; --host "
            "and --port choose others\n"
        )
    (tmp_path / "broken.toml").write_text("port = ")
    cases = [
        ("no such model", (str(tmp_path / "nowhere"),), "nowhere"),
        ("broken file", (model, "--config", str(tmp_path / "broken.toml")), "broken.toml"),
        ("wrong option", (model, "--max-num-queued", "-1"), "max_num_queued"),
    ]
    for name, arguments, words in cases:
        told = failing(*arguments)
        assert told.count("\n") == 1, (name, told)
        assert words in told, (name, told)


def test_an_engine_that_cannot_load_says_why(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    told = failing(str(model), "--port", "0", "--max-model-len", "999999999")
    *_, last = told.splitlines()
    assert last.startswith("trueline: ")
    assert "max_model_len" in last
    assert "Traceback" not in told


# -- the end -------------------------------------------------------------------------------


def is_loading(served: Served) -> None:
    """And then ready."""
    status, told = readiness(served)
    assert (status, told["status"]) == (503, "loading")
    assert told["reason"]
    assert served.get("/health").status_code == 503
    assert served.get("/health/live").status_code == 200
    assert ask(served).error["code"] == "loading"
    served.wait_for("listening on")
    assert readiness(served) == (200, {"status": "ready", "reason": None})


def test_ready_from_loading_to_sigterm_which_lets_streams_finish(tiny: Tiny) -> None:
    with serving(tiny("deepseek_v3"), wait=False) as served, wire(served.url) as waiting:
        is_loading(served)
        right = json.loads(ask(served, LONG | {"max_tokens": 300}).body)["choices"][0]["text"]
        streams = [begun(served, max_tokens=300) for _ in range(3)]
        waiting.send(posted(ASK)[:-5])  # a body that will not come whole
        served.signal(signal.SIGTERM)
        served.wait_for("draining")
        status, told = readiness(served)
        assert (status, told["status"]) == (503, "draining")
        refused = ask(served)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert waiting.answer().error["code"] == "draining"
        for connection in streams:
            *frames, last = events(connection.answer().body)
            assert last is None
            assert "".join(frame["choices"][0]["text"] for frame in frames) == right
            connection.close()
        assert served.ended() == 0
        assert "Traceback" not in served.rest_of_log()


def test_what_takes_too_long_is_ended_with_an_error(tiny: Tiny) -> None:
    with serving(tiny("deepseek_v3"), "--shutdown-timeout", "0.5") as served:
        engine = served.engine_pid()
        stuck = begun(served)  # it reads no further
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(ask, served, LONG)
            stream = begun(served)
            eventually(lambda: metric(served, "num_requests_running") == 3)
            served.signal(signal.SIGTERM)
            answer = stream.answer()
            *frames, last = events(answer.body)
            assert "choices" in frames[-1]
            assert last["error"]["message"] == "the server is shutting down"
            assert whole.result().status == 503
            assert whole.result().error["message"] == "the server is shutting down"
        assert served.ended() == 0
        assert not is_alive(engine)
        stuck.close()
        assert "Traceback" not in served.rest_of_log()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_second_signal_ends_at_once(tiny: Tiny, number: signal.Signals, code: int) -> None:
    with serving(tiny("deepseek_v3")) as served:
        engine = served.engine_pid()
        stream = begun(served)
        served.signal(number)
        served.wait_for("draining")
        assert served.process.poll() is None
        served.signal(number)
        assert served.ended() == code
        eventually(lambda: not is_alive(engine))
        stream.close()


# -- clients -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(tiny: Tiny) -> Iterator[Served]:
    """Little patience, little room; and all of it is there again when its tests are done."""
    flags = ("--request-timeout", "1", "--read-timeout", "1", "--max-body-bytes", "200000",
             "--max-num-seqs", "4", "--max-num-queued", "0",
             "--cors-origin", "http://page")  # fmt: skip
    with serving(tiny("deepseek_v3"), *flags) as served:
        big = json.dumps({"prompt": "x" * 50_000}).encode()  # it is read in a thread
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: served.post("/tokenize", content=big), range(32)))
        front = served.process.pid
        before = descriptors(front), threads(front), threads(served.engine_pid())
        yield served
        eventually(lambda: is_idle(served))
        assert metric(served, "kv_cache_usage_perc") == 0
        eventually(lambda: descriptors(front) <= before[0])
        assert threads(front) <= before[1]
        assert threads(served.engine_pid()) <= before[2]
        assert len(text(served)) > 0
        served.signal(signal.SIGTERM)
        assert served.ended() == 0
        assert "Traceback" not in served.rest_of_log()


def test_a_request_that_takes_too_long(strict: Served) -> None:
    start = time.monotonic()
    whole = ask(strict, LONG)
    assert time.monotonic() - start > 0.9
    assert (whole.status, whole.error["code"]) == (504, "timeout")
    with wire(strict.url) as connection:
        connection.send(posted(LONG | {"stream": True, "n": 2, "temperature": 1}))
        *frames, last = events(connection.answer().body)
    assert len(frames) > 10
    assert last["error"]["code"] == "timeout"
    eventually(lambda: is_idle(strict))


def test_a_reader_that_stops_reading_takes_no_room(strict: Served) -> None:
    """What was made for it is more than sockets hold."""
    asked = LONG | {"logprobs": 5, "stream": True, "n": 4, "temperature": 1}
    stuck = []
    for _ in range(3):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = strict.url.removeprefix("http://").partition(":")
        connection.connect((host, int(port)))
        connection.sendall(posted(asked))
        stuck.append(connection)
        eventually(lambda: not is_idle(strict), 2)
        eventually(lambda: is_idle(strict))
    assert text(strict)
    for connection in stuck:
        connection.close()


def test_bodies_that_are_too_large_or_do_not_come(strict: Served) -> None:
    with wire(strict.url) as connection:
        connection.send(request("POST", "/tokenize", headers={"transfer-encoding": "chunked"}))
        for _ in range(3):
            connection.send(b"14000\r\n" + b" " * 0x14000 + b"\r\n")  # and no end
        found = connection.answer()
        assert (found.status, found.error["code"]) == (413, "body_too_large")
    with wire(strict.url) as connection:
        connection.send(request("POST", "/tokenize", headers={"content-length": "200001"}))
        assert connection.answer().status == 413
    with wire(strict.url) as connection:
        connection.send(posted(ASK)[:-1])
        found = connection.answer()
        assert (found.status, found.error["code"]) == (408, "body_timeout")
    for cut in (1, 20, len(posted(ASK)) - 1):
        with wire(strict.url) as connection:
            connection.send(posted(ASK)[:cut])


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /version HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /version HTTP/1.1\r\nx: \x00\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET " + b"/%ff%00\xff" + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(strict: Served, sent: bytes) -> None:
    with wire(strict.url) as connection:
        connection.send(sent)
        assert connection.answer().status == 400
        assert connection.ended()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-request-id": "\xff" * 9}, 200),
        ({"x-request-id": "a" * 5000}, 200),
        ({"authorization": "\xe9"}, 200),
        ({"content-type": "text/\xe9; charset=nothing"}, 200),
        ({"expect": "100-continue"}, 200),
        ({"upgrade": "websocket", "connection": "upgrade"}, 200),
        ({"accept-encoding": "gzip", "range": "bytes=0-1"}, 200),
        ({f"x-{i}": "y" * 100 for i in range(300)}, 200),
    ],
)
def test_headers_that_are_odd(strict: Served, headers: dict[str, str], status: int) -> None:
    with wire(strict.url) as connection:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.send(f"GET /v1/models HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        assert connection.answer().status == status


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many", "one that is long"])
def test_heads_without_an_end(strict: Served, line: bytes) -> None:
    with wire(strict.url) as connection:
        connection.send(b"GET /version HTTP/1.1\r\nx: ")
        told = b""
        try:
            for _ in range(400):
                connection.send(line * (10_000 // len(line)))
            told = connection.line()
        except (BrokenPipeError, ConnectionResetError):
            told = b"HTTP/1.1 431"  # we were not listening
        assert told.startswith(b"HTTP/1.1 431")


def test_the_slow_stop_nobody_and_are_left(strict: Served) -> None:
    slow = [Wire(strict.url) for _ in range(200)]
    for connection in slow[:100]:
        connection.send(b"POST /v1/comp")
    for connection in slow[100:]:
        connection.send(b"GET /version HTTP/1.1\r\nx: ")
    assert text(strict)
    for connection in slow:
        assert connection.ended()
        connection.close()


def test_pipelined_requests_are_answered_in_order(strict: Served) -> None:
    asked = [{"prompt": f"{i}", "max_tokens": 1 + i, "ignore_eos": True} for i in range(6)]
    with wire(strict.url) as connection:
        connection.send(b"".join(posted(each, **{"x-request-id": f"r{i}"})
                                 for i, each in enumerate(asked)))  # fmt: skip
        for i in range(6):
            found = connection.answer()
            assert (found.status, found.headers["x-request-id"]) == (200, f"r{i}")
            assert json.loads(found.body)["usage"]["completion_tokens"] == 1 + i
        connection.send(posted(asked[3] | {"stream": True}) + posted(asked[2]))
        assert events(connection.answer().body)[-1] is None
        assert json.loads(connection.answer().body)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
@pytest.mark.parametrize("behind", [1, 3])
def test_a_pipelining_client_that_leaves(
    strict: Served, stream: bool, status: int, behind: int
) -> None:
    """Its first request is told, though it is not the last one that came."""
    name = f"left-{stream}-{behind}"
    with wire(strict.url) as connection:
        first = posted(LONG | {"stream": stream}, **{"x-request-id": name})
        connection.send(first + posted(ASK) * behind)
        if stream:
            while b"data: " not in connection.rest:
                assert connection._more()
        else:
            eventually(lambda: not is_idle(strict))
    line = strict.wait_for(name)
    assert f"status={status} " in line
    assert "client=gone" in line
    eventually(lambda: is_idle(strict))
    assert text(strict)


def test_methods(strict: Served) -> None:
    with wire(strict.url) as connection:
        for path in ("/version", "/health", "/metrics", "/v1/models"):
            connection.send(request("HEAD", path))
            assert connection.answer(head_only=True).status == 200
        for method in ("OPTIONS", "PUT", "DELETE", "PATCH"):
            connection.send(request(method, "/v1/completions"))
            found = connection.answer()
            assert (found.status, found.headers["allow"]) == (405, "POST")
            assert found.error["message"]


def test_pages_of_an_origin_may_ask(strict: Served) -> None:
    asked = "authorization,content-type,x-stainless-os,x-stainless-retry-count,x-new-one"
    wants = {"Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": asked}  # fmt: skip
    with wire(strict.url) as connection:
        for origin, allowed in (("http://page", "http://page"), ("http://other", None)):
            connection.send(
                request("OPTIONS", "/v1/completions", None, {"Origin": origin, **wants})
            )
            found = connection.answer()
            assert found.headers.get("access-control-allow-origin") == allowed
            assert found.status == (200 if allowed else 400)
            assert "access-control-allow-credentials" not in found.headers
            if allowed:
                may = found.headers["access-control-allow-headers"].lower()
                assert {name.strip() for name in may.split(",")} >= set(asked.split(","))
            connection.send(posted(ASK, Origin=origin))
            found = connection.answer()
            assert found.headers.get("access-control-allow-origin") == allowed
