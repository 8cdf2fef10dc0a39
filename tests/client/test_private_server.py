"""`trueline chat` of a model: its server is ready before the first message, and is gone with it,
however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trueline.utils.environment import child_processes

Tiny = Callable[..., Path]
SECONDS = 60.0


@contextmanager
def chatting(*arguments: Path | str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "trueline", "chat", *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def descendants(process: subprocess.Popen[str], count: int) -> list[int]:
    """Its processes, once there are so many."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        found = child_processes(process.pid)
        for pid in found:
            found += child_processes(pid)
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"fewer than {count} processes")


def assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + SECONDS
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < end, f"still running: {alive}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended; nobody has asked for its exit code yet


def say(process: subprocess.Popen[str]) -> None:
    """One turn."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline().endswith("\n")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (None, 0),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),
    ],
)
def test_nothing_is_left_after_a_chat(number: signal.Signals | None, code: int, tiny: Tiny) -> None:
    with chatting(tiny("deepseek_v3"), "--max-tokens", "2") as process:
        say(process)
        pids = descendants(process, 2)
        assert process.stdin is not None
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        assert process.wait(SECONDS) == code
    assert_gone(pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_a_server_that_was_starting(
    number: signal.Signals, code: int, tiny: Tiny
) -> None:
    with chatting(tiny("deepseek_v3")) as process:
        pids = descendants(process, 1)
        process.send_signal(number)
        assert process.wait(SECONDS) == code
    assert_gone(pids)


def test_a_server_that_dies_is_told(tiny: Tiny) -> None:
    with chatting(tiny("deepseek_v3"), "--max-tokens", "2") as process:
        say(process)
        server, *rest = descendants(process, 2)
        subprocess.run(["kill", "-9", str(server)], check=True)
        _, err = process.communicate("again\n", SECONDS)
        assert process.returncode == 1
        assert "the private server has ended with exit code -9" in err
    assert_gone([server, *rest])


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with chatting("--model", tmp_path) as process:
        _, err = process.communicate("", SECONDS)
    assert process.returncode == 2
    assert err.startswith(f"trueline: {tmp_path}")
