"""How often a rank's memory is checked for foreign writes (engine/canaries), and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.config import EngineConfig
from trueline.device import Device

AUTO_INTERVAL = {"cpu": 32, "cuda": 0}
"""Steps. On a GPU what it costs has not been measured."""
CHECK_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    interval: int
    """Steps from one check to the next."""
    check_bytes: int
    """That a check looks at, at most: the rest has its turn in those that follow."""
    guard_bytes: int
    """Of a block and a slot behind the last ones, which nobody is given."""
    report_dir: str | None

    @staticmethod
    def of(config: EngineConfig, device: Device, guard_bytes: int) -> CanaryPlan | None:
        interval = config.canary_interval
        if interval == "auto":
            interval = AUTO_INTERVAL[device.kind]
        if not interval:
            return None
        most = CHECK_BYTES[device.kind]
        return CanaryPlan(interval, most, guard_bytes, config.canary_report_dir)

    def __str__(self) -> str:
        steps = "step" if self.interval == 1 else f"{self.interval} steps"
        return f"every {steps}, {self.check_bytes / 1e6:,.1f} MB of the caches at most"
