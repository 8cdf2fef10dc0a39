"""The offline engine and the server, each started as a user starts it. No torch here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trueline.errors import TruelineError
from trueline.utils.json_types import JSON

LISTENING = "listening on "
SECONDS_TO_END = 30.0


class NotStarted(TruelineError):
    exit_code = 1


class Offline:
    def __init__(self, model: str, options: JSON) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trueline.bench.overhead.offline", model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Until it is loaded."""
        self._line()

    def measure(self, prompts: list[list[int]], output_len: int) -> JSON:
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "output_len": output_len}), file=self.process.stdin,
              flush=True)  # fmt: skip
        found: JSON = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NotStarted("the offline engine ended; its words are above")
        return line


class Served:
    """`trueline serve` on a free port. What it writes is kept, for the case that it fails."""

    def __init__(
        self,
        model: str,
        options: JSON,
        *more: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: of the process, if not this one's."""
        command = [sys.executable, "-m", "trueline", "serve", model, "--port", "0", *more]
        self.process = subprocess.Popen(
            [*command, *flags(options)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.url = ""
        self._words: deque[str] = deque(maxlen=100)

    def wait(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._words.append(line)
            if line.startswith(LISTENING):
                self.url = line.removeprefix(LISTENING).strip()
                threading.Thread(target=self._read, daemon=True).start()
                return
        raise NotStarted(f"the server did not start:\n{''.join(self._words)}".rstrip())

    def said(self, part: str) -> str:
        """The first line of its last words that has this in it."""
        return next((line.strip() for line in self._words if part in line), "")

    def _read(self) -> None:
        """Whoever writes to a full pipe waits."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._words.append(line)


def flags(options: JSON) -> Iterator[str]:
    """An engine's options as `trueline serve` takes them."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", str(value))


@contextmanager
def both(
    model: Path, options: JSON, has_weights: bool, tokenizer: Path
) -> Iterator[tuple[Offline, Served]]:
    """Loaded one after the other: together they would slow each other and the second would plan
    with memory that the first is about to take."""
    offline = Offline(str(model), options)
    started: list[subprocess.Popen[str]] = [offline.process]
    try:
        offline.wait()
        # no prefix caching, as offline: both would find their prompts of the round before
        more = ["--tokenizer", str(tokenizer), "--no-enable-prefix-caching"]
        more += [] if has_weights else ["--load-format", "dummy"]
        served = Served(str(model), options, *more)
        started.append(served.process)
        served.wait()
        yield offline, served
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(SECONDS_TO_END)
