"""`trueline replay`: what a file holds, run again on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.errors import TruelineError, UsageError
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.reference import read_config
from trueline.utils.hub import find_model
from trueline.verify.replay.alone import AS_SCHEDULED, PartAlone, Verdict, composition_of
from trueline.verify.replay.file import Asked, Header, OpChecked, Recorded, read
from trueline.verify.replay.record import dtype_name, names_of
from trueline.verify.report import Check, Status
from trueline.verify.suite import distribution, ops, preflight
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.definition import Definition
from trueline.verify.suite.environment import fingerprint
from trueline.verify.suite.numbers import Numbers, layer_checks, mode_checks
from trueline.verify.suite.outcome import Todo, carry_out
from trueline.verify.suite.session import Session

RIGHT, WRONG, NOT_RUN = 0, 1, 2
WHOLE = "with the whole model"


@dataclass
class Replayed:
    header: Header
    record: Verdict | None = None
    """The recorded numbers, judged again."""
    runs: list[Verdict] = field(default_factory=list)
    """On this machine."""
    not_run: list[str] = field(default_factory=list)
    """What was not run, and why."""

    @property
    def code(self) -> int:
        if any(verdict.wrong for verdict in self.runs):
            return WRONG
        return RIGHT if self.runs else NOT_RUN


def replay_file(
    file: str | Path,
    model: str | Path | None = None,
    *,
    ops: Mapping[str, str] | None = None,
    device: str = "auto",
) -> Replayed:
    """Run what a failed check has recorded, alone: the part of the model that was wrong on its
    recorded inputs, and with `model`, the same checkpoint, the whole composition. `ops`: other
    implementations than the plan's."""
    recorded = read(Path(file))
    made = Replayed(recorded.header)
    directory = None if model is None else _same_checkpoint(recorded.header, find_model(model))
    given = dict(recorded.header.config.get("ops", {})) | dict(ops or {})
    config = recorded.header.engine_config(device=device, ops=given)
    if recorded.header.op is not None:
        made.runs.append(_op(recorded.header.op, given, device))
        return made
    if recorded.header.half is not None:
        _alone(made, recorded, directory, config)
    if directory is None:
        made.not_run.append(f"{WHOLE}: give the checkpoint with --model")
    else:
        _whole(made, directory, config)
    return made


def _same_checkpoint(header: Header, directory: Path) -> Path:
    found = fingerprint(directory)
    if found != header.model.fingerprint:
        raise UsageError(
            f"{directory}: another checkpoint than {header.model.name} that the file is of: its "
            f"config, headers and sizes give {found}, recorded is {header.model.fingerprint}"
        )
    return directory


def _op(asked: OpChecked, given: Mapping[str, str], device: str) -> Verdict:
    check = ops.named_check(asked.op, asked.check)
    if check is None:
        raise UsageError(f"op {asked.op} has no check '{asked.check}' in this version")
    name = given.get(asked.op, asked.implementation)
    todo = Todo(
        f"ops/{asked.op}={name}, {asked.check}", "op = reference", asked.check,
        lambda: ops.run_check(
            asked.op, name, check, find_device(device).torch, getattr(torch, asked.dtype)
        ),
    )  # fmt: skip
    return _of_check(f"{asked.op}={name}", carry_out(todo))


def _of_check(way: str, check: Check) -> Verdict:
    if check.status == Status.NOT_COVERED:
        raise UsageError(check.evidence)
    return Verdict(way, check.status != Status.PASSED, check.evidence)


# -- one part --------------------------------------------------------------------------


def _alone(
    made: Replayed, recorded: Recorded, directory: Path | None, config: EngineConfig
) -> None:
    if not recorded.weights and directory is None:
        made.not_run.append(
            f"the part alone: the file has not {', '.join(recorded.header.left_out)}"
        )
        return
    with _weights_of(recorded, directory) as there:
        try:
            made.record = _part(recorded, there, config, then=True).judge_record()
            part = _part(recorded, there, config)
            verdicts = list(part.run(config))
        except TruelineError as error:
            made.not_run.append(f"the part alone: {error}")
            return
    half = recorded.header.half
    if half is not None and half.alone is False and not any(each.wrong for each in verdicts):
        # nothing has changed by that: what was wrong is not in it
        made.not_run.append("the part alone: it was right alone when it was recorded, and is now")
        return
    made.runs.extend(verdicts)
    if reason := part.not_run(AS_SCHEDULED):
        made.not_run.append(f"{AS_SCHEDULED}: {reason}")


@contextmanager
def _weights_of(recorded: Recorded, directory: Path | None) -> Iterator[Path]:
    if recorded.weights or directory is None:
        with recorded.as_model() as made:
            yield made
    else:
        yield directory


def _part(
    recorded: Recorded, directory: Path, config: EngineConfig, *, then: bool = False
) -> PartAlone:
    """`then`: with weights rounded as they were, not as this machine keeps them."""
    half, facts = recorded.header.half, config.facts
    assert half is not None
    plan = make_plan(read_model(directory, facts), config, find_device(config.device))
    compute, stored = plan.compute_dtype, plan.weight_dtype
    if then:
        compute = getattr(torch, recorded.header.compute)
        stored = getattr(torch, half.stored)
    numerics = half.numerics if then else plan.numerics.name
    device = str(plan.device.torch)
    definition = Definition(directory, compute, stored, numerics, facts, device)
    names = names_of(read_config(directory, **facts), half.layer, half.half)
    return PartAlone(recorded, directory, definition, names)


# -- the whole model -------------------------------------------------------------------


def _whole(made: Replayed, directory: Path, config: EngineConfig) -> None:
    header = made.header
    try:
        session = Session(header.model.name, directory, config)
        numbers = Numbers(session)
        made.runs.append(_whole_verdict(header, session, numbers))
    except TruelineError as error:
        made.not_run.append(f"{WHOLE}: {error}")


def _whole_verdict(header: Header, session: Session, numbers: Numbers) -> Verdict:
    half, asked = header.half, header.asked
    same = header.compute == dtype_name(session.plan.compute_dtype)
    if header.bands and same and not header.check.startswith("logits"):
        numbers.bands = header.noise()
    if half is None or asked is None:
        return _of_check(WHOLE, carry_out(_todo(header, session, numbers)))
    composition = composition_of(asked)
    check = carry_out(next(iter(mode_checks(numbers, [composition]))))
    verdict = _of_check(WHOLE, check)
    judged = numbers.judged.get(composition.name)
    if judged is None or not verdict.wrong:
        return verdict
    there = [
        each for each in judged.wrong()
        if (each.off.layer, each.off.part, each.off.request)
        == (half.layer, half.part, half.request)
    ]  # fmt: skip
    words = "" if there else f"; right in {half.part} of layer {half.layer} now"
    return Verdict(WHOLE, True, verdict.what + words)


def _todo(header: Header, session: Session, numbers: Numbers) -> Todo:
    if header.asked is not None:
        composition = composition_of(header.asked)
        return _todo_of(header.check, header.asked, composition, numbers)
    for todo in preflight.checks(session):
        if todo.id == header.check:
            return todo
    raise UsageError(f"check {header.check} is not one of this version")


def _todo_of(check: str, asked: Asked, composition: Composition, numbers: Numbers) -> Todo:
    group = check.partition("/")[0]
    if group == "layers":
        return next(iter(layer_checks(numbers, composition)))
    if group == "logits":
        return Todo(
            check, asked.invariant, asked.what, lambda: distribution.logits(numbers, composition)
        )
    return next(iter(mode_checks(numbers, [composition])))
