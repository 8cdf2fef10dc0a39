"""Tests, or a run of verify, in forked children. The parent has imported what takes long and none
of our own modules, so a child begins at once and imports them from the source that it is given."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from mutants.listed import ROOT

# No GPU, wherever this runs: the list is about checks that everybody can run.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRITON_INTERPRET"] = "1"

import hypothesis  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch  # noqa: F401
import transformers
import triton.language  # noqa: F401

transformers.DeepseekV3ForCausalLM  # noqa: B018 - looked up, it is imported with all it needs
for plugin in entry_points(group="pytest11"):
    plugin.load()

# What make test runs: a mutant that only a slow test sees is a survivor.
ARGUMENTS = ("-p", "no:cacheprovider", "-p", "mutants.unshrunk", "-q", "--tb=no", "-m", "not slow")
STRANGE = 99
"""The exit status of a child that has imported something else than its source."""


@dataclass
class Child:
    pid: int
    log: Path
    began: float

    def status(self) -> int | None:
        """None as long as it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def end(self) -> None:
        """Whatever it has started ends too."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def start(source: Path, place: Path, run: Callable[[Path], int], *, native: bool) -> Child:
    """`place`: a directory of its own, which `run` is called with; what that returns is the exit
    status."""
    assert "trueline" not in sys.modules, "children would inherit it"
    log = place / "log"
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Child(pid, log, time.monotonic())
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(source)
        if native:  # else the user's cache would fill with broken kernels
            os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        sys.path.insert(0, str(source))
        status = run(place)
        found = Path(sys.modules["trueline"].__file__ or "")
        if found.parent != source / "trueline":
            print(f"imported {found}, not {source}", flush=True)
            status = STRANGE
        sys.stdout.flush()
        os._exit(status)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(STRANGE)


def tests(names: list[str], *more: str) -> Callable[[Path], int]:
    """pytest's arguments, as what a child runs."""
    return lambda place: int(
        pytest.main([*ARGUMENTS, f"--basetemp={place / 'tmp'}", *more, *names])
    )
