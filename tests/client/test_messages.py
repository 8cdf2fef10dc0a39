"""Messages of several lines: from a terminal, a pipe and the command line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from stub_server import Stub, stub_server
from terminals import on_a_terminal

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as running:
        running.models = ["paced"]
        yield running


def asked(stub: Stub) -> list[str]:
    return [body["messages"][-1]["content"] for body in stub.bodies]


BLOCKS = {
    'a\n"""b\nc"""\nd\n': ["a", "b\nc", "d"],
    '"""\nb\n\n  c\n"""  \n': ["b\n\n  c"],
    '"""one line"""\n': ["one line"],
    '"""\n/usr/bin\nis a path"""\n': ["/usr/bin\nis a path"],
    '"""\n//x"""\n': ["//x"],
    '"""\n"""\nx\n': ["x"],  # nothing said
    "a\x0bb\x0cc\nd\u2028e": ["a\x0bb\x0cc", "d\u2028e"],  # no ends of lines
}


@pytest.mark.parametrize("text", BLOCKS)
def test_of_a_pipe(text: str, stub: Stub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text, newline=""))
    assert run("chat", stub.url, "--quiet", "--max-tokens", 1)[0] == 0
    assert asked(stub) == BLOCKS[text]


def test_one_that_does_not_end(stub: Stub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('a\n"""b\n'))
    code, _, err = run("chat", stub.url, "--quiet", "--max-tokens", 1)
    assert code == 2
    assert 'begins with """ ends with """' in err
    assert asked(stub) == ["a"]


def test_all_of_stdin_as_one(stub: Stub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('/a\n"""b\n'))
    code, _, _ = run(
        "chat", stub.url, "--quiet", "--max-tokens", 1, "--message", "x", "--message", "-"
    )
    assert code == 0
    assert asked(stub) == ["x", '/a\n"""b\n']


@pytest.mark.parametrize("option", [(), ("--prompt-file", "-")])
def test_complete_takes_stdin(
    option: tuple[str, ...], stub: Stub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))
    assert run("complete", stub.url, "--quiet", *option)[0] == 0
    assert stub.bodies[-1]["prompt"] == "a\n\nb\n"


def test_what_is_no_text(stub: Stub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (("complete",), ("chat",), ("chat", "--message", "-")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), "utf-8"))
        code, _, err = run(*verb[:1], stub.url, *verb[1:])
        assert code == 2
        assert "stdin" in err
    assert stub.bodies == []


def test_on_a_terminal(stub: Stub) -> None:
    ask = [sys.executable, "-m", "trueline", "chat", stub.url, "--quiet", "--max-tokens", "1"]
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with on_a_terminal(ask, env) as terminal:
        for said in ('"""a\r b\r"""\r', "\x1b[200~c\rd\x1b[201~\r", "e\r"):
            terminal.wait_for("> ")
            terminal.send(said)
            terminal.wait_for("t0 ")
        terminal.wait_for("> ")
        terminal.send('"""never\r')
        terminal.wait_for("… ")
        # Python hears of a signal in the moment between prompt and waiting when the line ends
        terminal.send("\x03\r")
        terminal.wait_for("leaves)")
        terminal.wait_for("> ")
        terminal.send("f\r")
        terminal.wait_for("t0 ")
        terminal.wait_for("> ")
        terminal.send("\x04")
    assert asked(stub) == ["a\n b", "c\nd", "e", "f"]


def test_complete_on_a_terminal(stub: Stub) -> None:
    ask = [sys.executable, "-m", "trueline", "complete", stub.url, "--quiet"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with on_a_terminal(ask, env) as terminal:
        terminal.wait_for("Ctrl-D ends it)")
        terminal.send("a\nb\n\x04")
        terminal.wait_for("t0 ")
    assert stub.bodies[-1]["prompt"] == "a\nb"
