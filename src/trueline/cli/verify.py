"""`trueline verify`: whether this model, on this machine, with these options, computes what it
should."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from cyclopts import Parameter

from trueline.cli.completion import MODEL
from trueline.cli.engine_flags import EngineFlags
from trueline.cli.output import tables
from trueline.errors import UsageError
from trueline.utils.builtin import BUILTIN_MODELS
from trueline.utils.progress import lines_between

if TYPE_CHECKING:
    from trueline.config import EngineConfig
    from trueline.verify.report import Check, Report
    from trueline.verify.suite.composition import Tier
    from trueline.verify.suite.estimate import Estimate
    from trueline.verify.suite.run import Progress

ENGINE = Parameter(name="*", group="Engine")
SECONDS_BETWEEN_LINES = 10.0
Flag = Annotated[bool, Parameter(negative=())]


def verify(
    model: Annotated[tuple[str, ...], MODEL] = (),
    /,
    *,
    smoke: Flag = False,
    full: Flag = False,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    prompt: str | None = None,
    faults: Flag = False,
    fault: tuple[str, ...] = (),
    out: Path | None = None,
    replay_dir: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    quiet: Flag = False,
    op: tuple[str, ...] = (),
    layer: tuple[str, ...] = (),
    fact: tuple[str, ...] = (),
    engine: Annotated[EngineFlags, ENGINE] = EngineFlags(),  # noqa: B008
) -> int:
    """Check that a model computes here what it should: facts, weights, ops, every layer, every way
    a batch can be composed.

    Each half of each layer is held against a float64 definition that shares no code with the
    engine, on the engine's own inputs. What is accepted is measured in the same run, and so is
    how small an error it would have noticed (docs/verify.md). Ends with exit code 1 where
    something is wrong. Ctrl-C (or SIGTERM) ends it with a report of what was checked until then.

    Parameters
    ----------
    model
        Model directories, built-in models, or hub ids (owner/name). Default: all built-in
        models.
    smoke
        Less than a minute for a built-in model: facts, layers, logits and the commonest batches.
    full
        Also what takes long: the longest context that the definition can hold, more ranks, and the
        model with one option changed at a time: caches, blocks, batch invariance, each op by every
        other implementation that runs here.
    only
        Groups (preflight, layers, logits, modes, ops), invariants or ids of checks to run; * stands
        for anything. May be given several times.
    skip
        Likewise, not to run.
    prompt
        A text of your own for the layers and the logits.
    faults
        Instead: put known bugs into the running engine one at a time, and tell which of them
        such a run would have caught, by what and in which layer.
    fault
        With --faults: only the bug of this id (docs/faults.md). May be given several times.
    out
        Write MODEL.json, MODEL.html and MODEL.xml (JUnit) into this directory.
    replay_dir
        Write a file for trueline replay of each check that fails into MODEL in this directory.
        Default: replays in that of --out.
    as_json
        Print reports as JSON instead of tables.
    quiet
        Print the verdict and what is wrong.
    op
        Choose an implementation of an op, ours or an installed package's, as linear=torch_mm.
        May be given several times.
    layer
        Replace a kind of layer by an installed package's, as lightning=NAME. May be given
        several times.
    fact
        Override a fact that published sources contradict each other on, as NAME=VALUE. May be
        given several times.
    """
    if smoke and full:
        raise UsageError("--smoke and --full: give one of them")
    if fault and not faults:
        raise UsageError("--fault is for --faults")
    if out is not None:
        _make_directory(out)
    from trueline.verify.suite.faults import named_faults
    from trueline.verify.suite.run import Selection
    from trueline.verify.suite.run import verify as verify_model

    named_faults(fault)  # what is wrong with them is told before a model is loaded

    selection = Selection(
        tier="smoke" if smoke else "full" if full else "standard", only=only, skip=skip
    )
    config = engine.config(op, layer, fact)
    reports: list[Report] = []
    for name in model or tuple(BUILTIN_MODELS):
        with _progress(name) as shown, _interruptible():
            report = verify_model(
                name, config, selection, prompt=prompt, progress=shown.progress,
                with_power=not faults, replay_dir=_replays(name, out, replay_dir),
                estimated=shown.estimated, checked=shown.checked,
            )  # fmt: skip
            if faults and not report.interrupted:
                _add_faults(report, name, config, selection.tier, fault, shown.progress)
        report.command = shlex.join(["trueline", *sys.argv[1:]])
        reports.append(report)
        if out is not None:
            _write(out, report)
        if not as_json:
            _print(report, quiet)
        if report.interrupted:
            break
    if as_json:
        from trueline.verify.report import encode

        encoded = [encode(report) for report in reports]
        text = encoded[0] if len(model) == 1 else b"[" + b",".join(encoded) + b"]"
        print(text.decode())
    if any(report.failed for report in reports):
        return 1
    return 130 if reports[-1].interrupted else int(not all(report.passed for report in reports))


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, as `timeout` and batch systems send it, as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _add_faults(
    report: Report,
    name: str,
    config: EngineConfig,
    tier: Tier,
    ids: tuple[str, ...],
    progress: Progress,
) -> None:
    from trueline.utils.hub import find_model
    from trueline.verify.suite.faults import Patient, fault_rows, named_faults

    patient = Patient(name, find_model(name), config, tier)
    try:
        report.faults.extend(fault_rows(patient, named_faults(ids), progress))
    except KeyboardInterrupt:
        report.interrupted = True


def _print(report: Report, quiet: bool) -> None:
    from trueline.verify.report.terminal import print_report

    print_report(tables(), report, quiet=quiet)


def _write(directory: Path, report: Report) -> None:
    """Under the model's own name, whatever path it was given by."""
    from trueline.verify import report as reports
    from trueline.verify.report.html import page
    from trueline.verify.report.junit import junit_xml

    name = Path(report.model.name).name or "model"
    reports.write(report, directory / f"{name}.json")
    reports.write_file(directory / f"{name}.html", page(report).encode())
    reports.write_file(directory / f"{name}.xml", junit_xml(report).encode())


def _replays(name: str, out: Path | None, given: Path | None) -> Path | None:
    if given is None and out is not None:
        given = out / "replays"
    return None if given is None else given / (Path(name).name or "model")


def _make_directory(path: Path) -> None:
    """Before minutes of work, not after them."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path}: not a directory to write to ({error.strerror})") from error


class _Shown(NamedTuple):
    """What is told while a model is checked."""

    progress: Progress
    estimated: Callable[[Estimate], None]
    checked: Callable[[Check], None]


@contextmanager
def _progress(name: str) -> Iterator[_Shown]:
    """A line that changes on a terminal; elsewhere one every few seconds."""
    if not sys.stderr.isatty():
        print(f"{name} …", file=sys.stderr)
        tell = lines_between(sys.stderr, SECONDS_BETWEEN_LINES)
        yield _Shown(
            lambda check, done, total: tell(f"{name}: {done} of {total} checks, {check}"),
            lambda estimate: print(f"{name}: {estimate}", file=sys.stderr),
            lambda check: _tell_failed(check, lambda line: print(line, file=sys.stderr)),
        )
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield _Shown(
            lambda check, done, total: bar.update(
                task, completed=done, total=total, description=check
            ),
            lambda estimate: console.print(f"{name}: {estimate}", highlight=False),
            lambda check: _tell_failed(
                check, lambda line: console.print(line, highlight=False, markup=False)
            ),
        )


def _tell_failed(check: Check, tell: Callable[[str], None]) -> None:
    """At once: a long run need not be waited for."""
    from trueline.verify.report import Status, wording

    if check.status in (Status.FAILED, Status.ERROR):
        found = wording.finding(check.place, check.evidence)
        tell(f"{check.status.upper()} {wording.line(check.id)}: {found}")
    elif check.unusual:
        tell(f"UNUSUAL {wording.line(check.id)}: {wording.line(check.unusual[0])}")
