"""A server in processes of its own, as a user starts it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

SECONDS = 60.0


@dataclass
class Served:
    process: subprocess.Popen[str]
    lines: queue.Queue[str | None]
    log: list[str] = field(default_factory=list)
    url: str = ""

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=SECONDS, **options)

    def post(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", timeout=SECONDS, **options)

    def metric(self, name: str) -> float:
        """The sum over labels."""
        lines = self.get("/metrics").text.splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.partition("{")[0] == name]
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def wait_for(self, text: str) -> str:
        """A line of its log, of those not yet read."""
        end = time.monotonic() + SECONDS
        while (line := self.lines.get(timeout=max(end - time.monotonic(), 0.01))) is not None:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line with '{text}':\n" + "".join(self.log))

    def rest_of_log(self) -> str:
        while (line := self.lines.get(timeout=SECONDS)) is not None:
            self.log.append(line)
        return "".join(self.log)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children.split()}
        (found,) = [pid for pid, command in commands.items() if "process.engine_process" in command]
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(SECONDS)


@contextmanager
def serving(
    model: Path | str,
    *flags: str,
    wait: bool = True,
    program: Sequence[str] = (sys.executable,),
    launch: Sequence[str] = ("-m", "trueline"),
    at: Path | None = None,
    **environment: str,
) -> Iterator[Served]:
    command = [*program, *launch, "serve", str(model), "--port", "0", *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | environment, cwd=at
    )
    served = Served(process, queue.Queue())
    reader = threading.Thread(target=_read, args=(process, served.lines), daemon=True)
    reader.start()
    try:
        found = re.search(r'url"?[=:] ?"?([^\s"]+)', served.wait_for("loading"))
        assert found is not None
        served.url = found[1]
        if wait:
            served.wait_for("listening on")
        yield served
    finally:
        process.kill()
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.put(line)
    lines.put(None)
