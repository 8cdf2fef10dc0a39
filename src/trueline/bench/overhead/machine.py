"""CPU use of our processes and of others during a run. An engine's threads wait for each other, so
a core that another process uses costs more than that core: such a run says nothing about the
server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from trueline.utils.environment import busy_seconds, process_seconds


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores in use on average."""

    ours: dict[str, float] = field(default_factory=dict)
    """By process."""
    others: float = 0.0


class CpuMeter:
    """From now until `stop`. Where the system has no counters, all figures are zero."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = processes
        self._time, self._all, self._ours = self._now()

    def stop(self) -> CpuUse:
        now, everybody, ours = self._now()
        seconds = max(now - self._time, 1e-9)
        used = {name: (ours[name] - self._ours[name]) / seconds for name in ours}
        return CpuUse(used, max((everybody - self._all) / seconds - sum(used.values()), 0.0))

    def _now(self) -> tuple[float, float, dict[str, float]]:
        ours = {name: process_seconds(pid) for name, pid in self._processes.items()}
        return time.monotonic(), busy_seconds(), ours
