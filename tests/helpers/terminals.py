"""A program on a terminal of its own, as a person would use it."""

from __future__ import annotations

import os
import pty
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SECONDS = 60.0


@dataclass
class Terminal:
    file: int
    shown: bytes = b""
    """All that the program has written."""
    seen: int = 0

    def send(self, text: str) -> None:
        os.write(self.file, text.encode())

    def wait_for(self, text: str) -> str:
        """What was written since the last call, up to this text."""
        end = time.monotonic() + SECONDS
        wanted = text.encode()
        while (at := self.shown.find(wanted, self.seen)) < 0:
            ready = select.select([self.file], [], [], max(0.0, end - time.monotonic()))[0]
            data = b""
            if ready:
                with suppress(OSError):  # the program has ended
                    data = os.read(self.file, 65536)
            assert data, f"no {text!r} in {self.shown[self.seen :]!r}"
            self.shown += data
        before, self.seen = self.shown[self.seen : at], at + len(wanted)
        return before.decode()


@contextmanager
def on_a_terminal(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Terminal]:
    pid, file = pty.fork()
    if pid == 0:
        os.execvpe(command[0], list(command), dict(env))
    try:
        yield Terminal(file)
    finally:
        os.close(file)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
