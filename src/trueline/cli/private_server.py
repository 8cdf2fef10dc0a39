"""A server for one client: a child process that listens on a free port of this machine, with an API
key that only we know. It ends with us, however we end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trueline.client.endpoint import Endpoint, endpoint
from trueline.client.wire import ServerError
from trueline.errors import TruelineError, UsageError
from trueline.models import read_model
from trueline.utils.environment import environment_with_key
from trueline.utils.hub import find_model, hub_id
from trueline.utils.json_types import JSON

# The child imports what we would import, whatever made our path, and nothing from where it starts.
BOOT = (
    "import json, sys; sys.path[:], arguments = json.loads(sys.stdin.readline()); "
    "from trueline.cli.private_server import serve; serve(arguments)"
)
FLAGS = ("--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--log-level", "info",
         "--shutdown-timeout", "0", "--on-engine-death", "exit")  # fmt: skip
END_SECONDS = 10.0
"""For the server to end by itself; then it is killed, and its engine process with it."""
LAST_LINES = 12


@contextmanager
def private_server(model: str, timeout: float, *, quiet: bool = False) -> Iterator[Endpoint]:
    """The server of a model, once it is ready; progress is told on stderr."""
    if hub_id(model) is not None:
        find_model(model, check=read_model)  # here, where somebody sees how far it is
    key = secrets.token_urlsafe(24)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_with_key(key),
        start_new_session=True,  # a terminal's Ctrl-C is for us alone
    )
    try:
        log = _Log(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # then its log says why
            process.stdin.write(json.dumps([sys.path, ["serve", model, *FLAGS]]) + "\n")
            process.stdin.flush()
        url = log.wait_until_ready(quiet)
        try:
            yield endpoint(url, key, timeout)
        except ServerError as error:
            raise log.explained(error) from error
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Closing its standard input tells the server that we are gone."""
    assert process.stdin is not None
    try:
        with suppress(subprocess.TimeoutExpired):
            with suppress(BrokenPipeError):  # it has not read its first line
                process.stdin.close()
            process.wait(END_SECONDS)
    finally:
        process.kill()
        process.wait()


class _Log:
    """What the server writes: events as JSON, and else what went wrong."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._words: deque[str] = deque(maxlen=LAST_LINES)

    def wait_until_ready(self, quiet: bool) -> str:
        """The server's address."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            event = self._read(line)
            if event.get("event") == "ready":
                threading.Thread(
                    target=self._drain, name="trueline-server-log", daemon=True
                ).start()
                return str(event["url"])
            if "phase" in event and not quiet:
                print(f"(loading: {event['phase']})", file=sys.stderr)
        raise self._ended()

    def explained(self, error: ServerError) -> TruelineError:
        """Where the server has ended, that is why its client failed."""
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return error
        return self._ended()

    def _ended(self) -> TruelineError:
        code = self._process.wait()
        said = "\n".join(self._words).removeprefix("trueline: ")
        if code == UsageError.exit_code:
            return UsageError(said)
        ended = f"the private server has ended with exit code {code}"
        return ServerError("no connection", f"{ended}: {said}" if said else ended)

    def _drain(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._read(line)

    def _read(self, line: str) -> JSON:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            if event.get("level") == "error":
                self._words.append(str(event.get("reason") or event["event"]))
            return event
        self._words.append(line.rstrip("\n"))
        return {}


def serve(arguments: list[str]) -> None:
    """The child: `trueline serve` until its parent ends."""
    from trueline.cli import main
    from trueline.utils.parent import when_the_parent_ends

    when_the_parent_ends(_stop)
    main(arguments)


def _stop() -> None:
    """As SIGTERM does; a server that hangs, or has not begun to listen to signals, is ended."""
    timer = threading.Timer(END_SECONDS / 2, os._exit, (1,))
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGTERM)
