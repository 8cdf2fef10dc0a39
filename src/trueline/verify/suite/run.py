"""`verify`: all checks of a tier on one model, and the report of them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import get_args

from trueline.config import EngineConfig
from trueline.errors import UsageError, described
from trueline.models import read_model
from trueline.text.tokenizer import Tokenizer
from trueline.utils.hub import find_model
from trueline.verify.report import Check, Report, Status, TokenDiff
from trueline.verify.suite import (
    answers,
    caches,
    compositions,
    distribution,
    environment,
    numbers,
    ops,
    options,
    power,
    preflight,
    readings,
    variants,
)
from trueline.verify.suite.composition import TIERS, Composition, Tier
from trueline.verify.suite.curves import curves
from trueline.verify.suite.estimate import Estimate, estimate
from trueline.verify.suite.localise import Failures
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.outcome import Todo, carry_out, not_run
from trueline.verify.suite.session import Session

Progress = Callable[[str, int, int], None]
"""Called with (check, number done, number in all)."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which checks: `only` and `skip` are groups, ids, invariants or patterns of them."""

    tier: Tier = "standard"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tier not in get_args(Tier):
            raise UsageError(f"tier = {self.tier!r}: accepted: {', '.join(get_args(Tier))}")

    def takes(self, todo: Todo) -> bool:
        if self.only and not any(_fits(todo, pattern) for pattern in self.only):
            return False
        return not any(_fits(todo, pattern) for pattern in self.skip)

    def check_known(self, todos: Sequence[Todo]) -> None:
        for option, patterns in (("--only", self.only), ("--skip", self.skip)):
            for pattern in patterns:
                if not any(_fits(todo, pattern) for todo in todos):
                    groups = sorted({todo.id.partition("/")[0] for todo in todos})
                    invariants = sorted({todo.invariant for todo in todos})
                    raise UsageError(
                        f"{option} {pattern}: no such check in this tier; accepted: groups "
                        f"({', '.join(groups)}), invariants ({', '.join(invariants)}), ids, and "
                        "patterns of these with *"
                    )


def _fits(todo: Todo, pattern: str) -> bool:
    names = (todo.id, todo.id.partition("/")[0], todo.invariant)
    return any(fnmatch(name, pattern) for name in names)


def verify(
    model: str | Path,
    config: EngineConfig,
    selection: Selection | None = None,
    *,
    prompt: str | None = None,
    with_power: bool = True,
    progress: Progress = lambda check, done, total: None,
    replay_dir: Path | None = None,
    estimated: Callable[[Estimate], None] = lambda estimate: None,
    checked: Callable[[Check], None] = lambda check: None,
) -> Report:
    """`replay_dir`: where a file for `trueline replay` is written of each check that fails.
    `estimated`: told how long it will take, before the checks begin. `checked`: told each check
    as it ends. On KeyboardInterrupt the report is of the checks before it."""
    selection = selection or Selection()
    started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
    options.require_covered(config)
    directory = find_model(model, check=partial(read_model, facts=config.facts))
    session = Session(str(model), directory, config, _prompt(directory, prompt))
    measured = Numbers(session)
    todos = list(all_checks(measured, selection.tier))
    selection.check_known(todos)
    todos = [todo for todo in todos if selection.takes(todo)]
    # how small an error would be seen is asked of a run of all checks
    with_power = with_power and not selection.only and selection.tier != "smoke"
    progress("timing a layer", 0, len(todos))
    expected = estimate(
        measured, todos, tier_compositions(session, selection.tier), with_power=with_power
    )
    if expected is not None:
        estimated(expected)
    checks: list[Check] = []
    failures = Failures(measured, replay_dir)
    interrupted = False
    try:
        for number, todo in enumerate(todos):
            _follow(measured, todo.id, lambda what, n=number: progress(what, n, len(todos)))  # type: ignore[misc]
            checks.append(carry_out(todo))
            failures.explain(checks[-1])
            checked(checks[-1])
    except KeyboardInterrupt:
        interrupted = True
        checks += [not_run(todo) for todo in todos[len(checks) :]]
    report = Report(
        model=environment.model(session),
        tier=selection.tier,
        only=list(selection.only),
        skip=list(selection.skip),
        options={name: str(getattr(config, name)) for name in options.given_options(config)},
        started=started.isoformat(timespec="seconds"),
        seconds=0.0,
        interrupted=interrupted,
        estimated=None if expected is None else expected.total,
        environment=environment.environment(session),
        plan=session.plan_lines,
        checks=checks,
    )
    if measured.bands is not None:
        report.bands = measured.bands.named_bands(session.plan.compute_dtype)
        report.curves = curves(measured)
        report.token_diffs = _diffs(measured, checks, directory)
        # what a wrong engine would notice says nothing
        wrong = any(c.group in ("layers", "modes") for c in report.failed)
        if with_power and not wrong and not interrupted:
            _add_power(report, measured, progress)
    report.seconds = time.perf_counter() - clock
    return report


def _add_power(report: Report, measured: Numbers, progress: Progress) -> None:
    try:
        report.power.extend(
            power.measure(measured, lambda done, total: progress("power", done, total))
        )
    except KeyboardInterrupt:
        report.interrupted = True
    except Exception as error:  # what the checks have found is told all the same
        report.checks.append(Check(
            id="power/injected errors", invariant="power",
            what="how small an error the checks would have seen",
            status=Status.ERROR, evidence=described(error),
        ))  # fmt: skip


def _follow(measured: Numbers, check: str, tell: Callable[[str], None]) -> None:
    """What a check is at, which may take long: the requests it runs, the layers it judges."""
    tell(check)
    measured.progress = lambda name, done, total: tell(f"{check}: requests of {name}")
    measured.judge.progress = lambda layer, count: tell(f"{check}: layer {layer + 1} of {count}")


def tier_compositions(session: Session, tier: Tier) -> list[Composition]:
    first, *others = compositions.compositions(session)
    wanted = TIERS.index(tier)
    return [first, *(each for each in others if TIERS.index(each.tier) <= wanted)]


def all_checks(measured: Numbers, tier: Tier) -> Iterator[Todo]:
    session = measured.session
    first, *others = tier_compositions(session, tier)
    if session.definition.room is not None:
        measured.together = [each for each in (first, *others) if not each.captured]
    yield from preflight.checks(session)
    yield from numbers.layer_checks(measured, first)
    yield from numbers.definition_checks(measured, first)
    yield from readings.checks(session)
    yield Todo(
        "logits/distribution",
        "oracle",
        "the next token's distribution at every position against the definition's own forward",
        lambda: distribution.logits(measured, first),
    )
    yield from numbers.mode_checks(measured, others)
    if tier != "smoke":
        yield from answers.checks(session)
        yield from caches.checks(session)
        yield from ops.checks(session)
    if tier == "full":
        yield from variants.checks(session)
    yield from options.checks(session)


def _prompt(directory: Path, text: str | None) -> list[int] | None:
    return None if text is None else Tokenizer.load(directory).encode(text)


def _diffs(measured: Numbers, checks: list[Check], directory: Path) -> list[TokenDiff]:
    """Of the first composition that failed, or else of the first."""
    failed = [c.id.partition("/")[2] for c in checks if c.status == Status.FAILED]
    name = next((each for each in failed if each in measured.judged), next(iter(measured.judged)))
    try:
        tokenizer = Tokenizer.load(directory)
    except UsageError:
        tokenizer = None
    return distribution.token_diffs(measured, name, tokenizer)
