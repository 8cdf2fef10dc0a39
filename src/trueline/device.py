"""What this machine is. The only place that asks."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from trueline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    kind: str
    name: str
    threads: int
    free_memory: int


def find_device(wanted: str) -> Device:
    if wanted not in ("auto", "cpu"):
        raise UsageError(f"device = {wanted!r}: accepted so far: 'auto' and 'cpu'")
    # One thread per core that we may use: more only makes them wait for each other.
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Device("cpu", torch.backends.cpu.get_cpu_capability(), threads or 1, _free_memory())


def _free_memory() -> int:
    """Bytes that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_directory() -> Path:
    """Where compiled kernels are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trueline"


def compiler() -> str | None:
    """The C++ compiler: CXX, or what is usually there."""
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([wanted] if wanted else ["c++", "g++", "clang++"]))
    return next((path for path in found if path), None)


def cpu_features() -> str:
    """Instruction sets: code compiled for this CPU must not run on another."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return torch.backends.cpu.get_cpu_capability()
