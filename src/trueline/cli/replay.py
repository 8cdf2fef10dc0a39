"""`trueline replay`: run again what a check of `trueline verify` found wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.arguments import parse_choices
from trueline.cli.completion import MODEL

if TYPE_CHECKING:
    from trueline.verify.replay.alone import Verdict
    from trueline.verify.replay.rerun import Replayed

SAYS = ("right now", "still wrong", "cannot be run here")


def replay(
    file: Path,
    /,
    *,
    model: Annotated[str | None, MODEL] = None,
    op: tuple[str, ...] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Run again, alone, what a check of trueline verify has found wrong.

    The recorded numbers are judged again. Then the part of the model that was wrong, which the
    file holds with its inputs and weights, runs on this machine as it was scheduled, as one
    prefill and token by token. With the checkpoint, the whole composition of requests does.
    Exit codes: 0 right now, 1 still wrong, 2 cannot be run here.

    Parameters
    ----------
    file
        What trueline verify --replay-dir wrote.
    model
        The checkpoint that it was recorded with: a directory, a built-in model, or a hub
        id. Another one is refused.
    op
        Another implementation of an op than the plan chooses, as mla_decode=reference. May be
        given several times.
    device
        auto is the GPU where there is one.
    as_json
        Print one JSON object.
    """
    from trueline.verify.replay.rerun import replay_file

    done = replay_file(file, model, ops=parse_choices("--op", op), device=device)
    if as_json:
        print(json.dumps(_plain(done), indent=1, ensure_ascii=False))
    else:
        print("\n".join(_lines(done)))
    return done.code


def _lines(done: Replayed) -> list[str]:
    header = done.header
    machine = header.environment.gpu or header.environment.cpu
    version = header.environment.commit or header.environment.trueline
    lines = [
        f"check     {header.check}: {header.what}",
        f"then      {header.evidence}",
        f"          {header.model.name}, {header.compute}, on {machine}, trueline {version}",
    ]
    if done.record is not None:
        judged = "judged wrong" if done.record.wrong else "no longer judged wrong"
        lines.append(f"record    {judged}: {done.record.what}")
    lines += [f"here      {verdict.way}: {_says(verdict)}" for verdict in done.runs]
    lines += [f"not run   {reason}" for reason in done.not_run]
    return [*lines, f"verdict   {SAYS[done.code]}"]


def _says(verdict: Verdict) -> str:
    return f"{'WRONG' if verdict.wrong else 'right'}; {verdict.what}"


def _plain(done: Replayed) -> dict[str, object]:
    header = done.header
    return {
        "check": header.check,
        "evidence": header.evidence,
        "model": header.model.name,
        "verdict": SAYS[done.code],
        "record": done.record and dataclasses.asdict(done.record),
        "runs": [dataclasses.asdict(verdict) for verdict in done.runs],
        "not_run": done.not_run,
    }
