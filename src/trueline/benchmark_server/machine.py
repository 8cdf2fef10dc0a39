"""Who had the cores meanwhile, as Linux counts it. A core that somebody else uses halves an engine
whose threads wait for each other, so a run beside others says nothing of the server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
IDLE = (3, 4)
"""Of the counts in /proc/stat: idle, and waiting for a disk."""
GUEST = 8
"""From here on they are counted twice."""


@dataclass(frozen=True, slots=True)
class Use:
    """Cores in use on average, one by one for ours."""

    ours: dict[str, float] = field(default_factory=dict)
    others: float = 0.0


class Meter:
    """From now until `stop`. Where there is no /proc, nobody is said to have used anything."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = processes
        self._time, self._all, self._ours = self._now()

    def stop(self) -> Use:
        now, everybody, ours = self._now()
        seconds = max(now - self._time, 1e-9)
        used = {name: (ours[name] - self._ours[name]) / seconds for name in ours}
        return Use(used, max((everybody - self._all) / seconds - sum(used.values()), 0.0))

    def _now(self) -> tuple[float, float, dict[str, float]]:
        if not (PROC / "stat").is_file():
            return time.monotonic(), 0.0, {}
        ticks = os.sysconf("SC_CLK_TCK")
        counts = list(map(int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]))
        busy = sum(counts[:GUEST]) - sum(counts[i] for i in IDLE)
        ours = {name: _ticks(pid) / ticks for name, pid in self._processes.items()}
        return time.monotonic(), busy / ticks, ours


def _ticks(pid: int) -> int:
    # the second field is the program's name, which may hold anything
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def children(pid: int) -> list[int]:
    file = PROC / str(pid) / "task" / str(pid) / "children"
    return list(map(int, file.read_text().split())) if file.is_file() else []
