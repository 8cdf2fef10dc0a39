"""The other ranks of this machine, each a child process. It ends when its parent does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

import msgspec

from trueline.engine.ranks.orders import WorkerStart

# The child imports what we would import, whatever made our path, and nothing from where it starts.
BOOT = (
    "import json, sys; sys.path[:], start = json.loads(sys.stdin.readline()); "
    "from trueline.engine.ranks.worker import main; sys.exit(main(start))"
)
SECONDS_TO_END = 20.0


class Alarm:
    """A descriptor that becomes readable when a rank is gone, for who waits for others too."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()

    def ring(self) -> None:
        with suppress(OSError):  # closed
            self._ends[1].send(b"!")

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def close(self) -> None:
        for end in self._ends:
            end.close()


class Workers(Protocol):
    """The ranks that rank 0 has started, wherever they are."""

    alarm: Alarm

    def deaths(self, seconds: float = 0.0) -> Sequence[tuple[int, int | None]]:
        """Ranks that have ended, with their exit codes where these are known; waits for one."""

    def pids(self) -> dict[int, int]: ...

    def kill(self) -> None:
        """Need not wait for their ends: clients wait for who calls it."""

    def wait(self) -> None:
        """For all to end by themselves; those that do not are killed."""

    def close(self) -> None: ...


class RankProcesses:
    def __init__(self, starts: Sequence[WorkerStart]) -> None:
        self.alarm = Alarm()
        self._deaths: list[tuple[int, int]] = []
        self._death = threading.Event()
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._children = {start.rank: _start(start) for start in starts}
        told = self._deaths, self._death, self._ended, self.alarm
        self._threads = [
            threading.Thread(target=_wait, args=(rank, child, *told), daemon=True)
            for rank, child in self._children.items()
        ]
        for thread in self._threads:
            thread.start()
        # also when nobody closes the engine that has them
        self._end = weakref.finalize(self, _kill, list(self._children.values()))

    def deaths(self, seconds: float = 0.0) -> list[tuple[int, int]]:
        """Ranks that have ended, with their exit codes; waits for one."""
        self._death.wait(seconds)
        return list(self._deaths)

    def ended(self) -> Iterator[tuple[int, int]]:
        """Ranks and their exit codes, as they end."""
        for _ in self._children:
            yield self._ended.get()

    def pids(self) -> dict[int, int]:
        return {rank: child.pid for rank, child in self._children.items()}

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()

    def close(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join()
        self.alarm.close()

    def wait(self) -> None:
        """For all to end by themselves; those that do not are killed."""
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
        self._end()


def _start(start: WorkerStart) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is for rank 0 alone
    )
    assert child.stdin is not None
    line = json.dumps([sys.path, msgspec.json.encode(start).decode()])
    child.stdin.write(line.encode() + b"\n")
    child.stdin.flush()
    return child


def _wait(
    rank: int,
    child: subprocess.Popen[bytes],
    deaths: list[tuple[int, int]],
    death: threading.Event,
    ended: SimpleQueue[tuple[int, int]],
    alarm: Alarm,
) -> None:
    code = child.wait()
    deaths.append((rank, code))
    death.set()
    ended.put((rank, code))
    alarm.ring()


def _kill(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.wait()
        if child.stdin is not None:
            with suppress(OSError):
                child.stdin.close()


def how_it_ended(code: int | None) -> str:
    if code is None:
        return "was lost: its process or its node has died"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
