"""Tiny models to run `trueline verify` on, and errors put into their engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trueline.config import EngineConfig
from trueline.engine.executor import local_runner
from trueline.verify.cases import CASES, make_subject
from trueline.verify.suite import compositions, power
from trueline.verify.suite.judgement import Judgement
from trueline.verify.suite.numbers import Numbers


def made(name: str, tmp_path: Path, **options: Any) -> tuple[Path, EngineConfig]:
    case = CASES[name]
    model = make_subject(name, tmp_path / name).model
    return model, EngineConfig(facts=case.facts, **{**case.options, **options})


def injected(numbers: Numbers, put: power.Put, size: float) -> Judgement:
    session = numbers.session
    first = next(iter(compositions.compositions(session)))
    with session.core() as core:
        undo = put(local_runner(core.executor).decoder, size)
        ran = compositions.serve_watched(session.drawn, first, core)
        undo()
    return numbers.judge.judge([ran.requests], [], numbers.bands)
