"""Schedules under canaries that look after every step: whatever a step writes is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trueline.config import EngineConfig
from trueline.engine.canaries.report import CanaryHit, CanaryReport
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.utils.json_types import JSON
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, close, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.schedules import MIXED, base, prompt


def findings(
    model: Path, asks: Sequence[Ask], config: EngineConfig, **changes: Any
) -> CanaryReport | None:
    """What canaries find while these requests are served; None: nothing was written that no step
    may write. Looks after every step, unless `changes` say otherwise."""
    with TemporaryDirectory() as reports:
        own: JSON = {"canary_interval": 1, "canary_report_dir": reports}
        return watched(load_engine(model, replace(config, **own | changes)).core, asks)


def watched(core: EngineCore, asks: Sequence[Ask]) -> CanaryReport | None:
    """The same on an engine that is there, and is closed. CheckFailed where a kind of its caches is
    not guarded, or it stopped for another reason."""
    canaries = local_runner(core.executor).canaries
    if canaries is None:
        raise CheckFailed("canaries: canary_interval = 0: nothing was looked at")
    if canaries.unguarded:
        raise CheckFailed(f"canaries: not guarded: {', '.join(canaries.unguarded)}")
    try:
        serve(core, asks)
        close(core)
    except CheckFailed as failed:
        report = report_of(failed)
        if report is None:
            raise
        return report
    return None


def report_of(error: BaseException) -> CanaryReport | None:
    """Of an engine that has stopped, where a canary is the reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CanaryHit):
        cause = cause.__cause__
    return None if cause is None else cause.report


def canaries_live(subject: Subject) -> None:
    """Mixed steps in small blocks, beginnings that are reused, preemption: nothing is written that
    is not the step's own, in any kind of cache."""
    config = base(subject)
    head = prompt(3 * 16, 7)
    again = [Ask([*head, 1, 2, 3], 3), Ask([*head, 4], 5, arrives=4), Ask(head[:30], 3, arrives=5)]
    tight = {"num_gpu_blocks_override": 16, "block_size": 8, "max_num_batched_tokens": 64}
    for asks, changes in (
        (MIXED, {"block_size": 5}),
        (again, {"snapshot_spacing": 16}),
        ([Ask(prompt(30, i), 30) for i in range(4)], tight),
    ):
        report = findings(subject.model, asks, config, **changes)
        if report is not None:
            raise CheckFailed(report.words())


CANARY_CHECKS: dict[str, Callable[[Subject], None]] = {"canaries": canaries_live}
