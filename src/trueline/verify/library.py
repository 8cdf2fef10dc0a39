"""`trueline.verify.verify`: a run of the checks, from a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueline.llm import engine_config
from trueline.utils.builtin import DEFAULT_MODEL
from trueline.verify.report import Report
from trueline.verify.suite import run
from trueline.verify.suite.composition import Tier
from trueline.verify.suite.run import Progress, Selection


def verify(
    model: str | Path = DEFAULT_MODEL,
    *,
    tier: Tier = "standard",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    prompt: str | None = None,
    with_power: bool = True,
    replay_dir: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """What `trueline verify MODEL` does; `options` are the engine's, as `LLM` takes them.
    `report.passed` says whether all is right, `report.failed` has the checks that went red, each
    with its place, its evidence and, with `replay_dir`, its replay file."""
    selection = Selection(tier=tier, only=tuple(only), skip=tuple(skip))
    return run.verify(
        model,
        engine_config(options),
        selection,
        prompt=prompt,
        with_power=with_power,
        progress=progress or (lambda check, done, total: None),
        replay_dir=None if replay_dir is None else Path(replay_dir),
    )
