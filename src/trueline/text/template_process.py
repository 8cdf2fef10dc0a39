"""Templates of strangers, rendered in a process that has little time and little memory.

No sandbox of a language bounds what it computes: `{{ 'a' * 10**9 }}`, `{{ 2 ** 10**9 }}`, nested
loops, a string that doubles itself, padding to a width. The kernel does: the process dies or hears
that there is no more memory, and its request is refused. The next one gets a new process.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

from trueline.errors import UsageError
from trueline.text.templates import render_template
from trueline.utils.environment import address_space_bytes, bare_environment

CPU_SECONDS = 2
"""For one text, and up to one more: the kernel counts whole ones of the process."""
MEMORY_BYTES = 256 << 20
"""Besides what the process has before it sees a template."""
MOST_CHARACTERS = 16 << 20
"""Of a text."""
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from trueline.text.template_process import main; main(int(sys.argv[1]))"
)


class TemplateProcess:
    """Started when it is needed; one text at a time."""

    def __init__(self, cpu_seconds: int = CPU_SECONDS) -> None:
        self.cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, values: Mapping[str, object]) -> str:
        """As `render_template`; UsageError also where it takes too much."""
        with self._lock:
            reply = self._exchange({"template": template, "values": values})
        if reply is None:
            raise UsageError(
                f"chat template stopped: it took more than {self.cpu_seconds} s of CPU time or "
                f"{MEMORY_BYTES >> 20} MiB of memory, the limits for a request's own template"
            )
        if "error" in reply:
            raise UsageError(reply["error"])
        return str(reply["text"])

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._ended()

    def _exchange(self, asked: dict[str, object]) -> dict[str, str] | None:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            self._ended()
            return None
        reply: dict[str, str] = json.loads(line)
        return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._ended()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(self.cpu_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=bare_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for us alone
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(sys.path).encode() + b"\n")
        return self._process

    def _ended(self) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError), self._process:
                pass  # closes its pipes and waits for it
            self._process = None


# -- in the process ------------------------------------------------------------------------


def main(cpu_seconds: int) -> None:
    """A line of JSON for each line of JSON, until there is no more: the parent has ended."""
    _bound_memory()
    for line in sys.stdin.buffer:
        _bound_time(cpu_seconds)
        try:
            reply = json.dumps(_reply(**json.loads(line)))
        except MemoryError:
            os._exit(1)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


def _reply(template: str, values: dict[str, object]) -> dict[str, str]:
    try:
        text = render_template(template, values)
    except UsageError as error:
        return {"error": str(error)}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"chat template makes a text of {len(text)} characters; accepted: up to "
                         f"{MOST_CHARACTERS}"}  # fmt: skip
    return {"text": text}


def _bound_memory() -> None:
    most = address_space_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
