"""The engine process as its parent's event loop sees it. No threads that poll: the loop watches the
socket's descriptor, and a thread that sleeps in waitpid reports the process's end."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

# The child imports what we would import, whatever made our path, and nothing from where it starts.
BOOT = (
    "import json, sys; sys.path[:], address = json.loads(sys.stdin.readline()); "
    "from trueline.server.process.engine_process import main; sys.exit(main(address))"
)


class ProcessHandle:
    """Starts the engine process, and holds the socket to it. `received` gets every message;
    `ended` is called once, with the exit code."""

    def __init__(
        self,
        received: Callable[[bytes], None],
        ended: Callable[[int], None],
    ) -> None:
        self._received, self._ended = received, ended
        self._unsent: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for us alone
        )
        # only we can enter it, and it is gone as soon as the child has found the socket
        self._directory: str | None = tempfile.mkdtemp(prefix="trueline-")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        address = f"ipc://{self._directory}/engine"
        self._socket.bind(address)
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([sys.path, address]).encode() + b"\n")
        self.process.stdin.flush()
        self.exit: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._wait, name="trueline-engine-exit", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Does not wait: the process takes seconds to connect, and may end before it does."""
        if not self._socket.closed:
            self._unsent.append(data)
            # sending may consume the descriptor's event for a message that has come
            self._loop.call_soon(self._read)
            self._flush()

    def _flush(self) -> None:
        with suppress(zmq.Again):
            while self._unsent:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()

    def kill(self) -> None:
        self.process.kill()

    def _wait(self) -> None:
        code = self.process.wait()
        with suppress(RuntimeError):  # the loop has ended before
            self._loop.call_soon_threadsafe(self._exited, code)

    def _read(self) -> None:
        """Reads all messages there are: zmq signals only once that some have come, or that the
        process has connected."""
        if not self._socket.closed:
            self._flush()
        with suppress(zmq.Again):
            while not self._socket.closed:
                data = self._socket.recv(zmq.NOBLOCK)
                self._forget_directory()
                self._received(data)

    def _exited(self, code: int) -> None:
        self._close()
        self.exit.set_result(code)
        self._ended(code)

    def _close(self) -> None:
        self._read()
        self._loop.remove_reader(self._descriptor)
        self._context.destroy(linger=0)
        self._forget_directory()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _forget_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def how_it_ended(code: int) -> str:
    if code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process ended with exit code {code}"
