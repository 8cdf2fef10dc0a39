"""What a check gives, and how it becomes a row of the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trueline.errors import TruelineError, described
from trueline.verify.failed import CheckFailed
from trueline.verify.report import Check, Measure, Place, Status
from trueline.verify.suite.forced import NotForced


@dataclass
class Outcome:
    evidence: str
    measures: list[Measure] = field(default_factory=list)
    ran: dict[str, str] = field(default_factory=dict)
    unusual: list[str] = field(default_factory=list)


class Wrong(CheckFailed):
    """A check that went red, with what it measured and where, and the implementations that ran."""

    def __init__(
        self,
        message: str,
        place: Place | None,
        measures: list[Measure],
        ran: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.place, self.measures, self.ran = place, measures, ran or {}


@dataclass(frozen=True)
class Todo:
    """A check to run."""

    id: str
    invariant: str
    what: str
    run: Callable[[], Outcome]


def not_run(todo: Todo) -> Check:
    """One that the run was interrupted before."""
    return Check(
        id=todo.id,
        invariant=todo.invariant,
        what=todo.what,
        status=Status.NOT_COVERED,
        evidence="the run was interrupted before it",
    )


def carry_out(todo: Todo) -> Check:
    start = time.perf_counter()
    check = Check(id=todo.id, invariant=todo.invariant, what=todo.what, status=Status.PASSED)
    try:
        outcome = todo.run()
        check.evidence, check.measures, check.ran = outcome.evidence, outcome.measures, outcome.ran
        check.unusual = outcome.unusual
    except NotForced as reason:
        check.status, check.evidence = Status.NOT_COVERED, str(reason)
    except Wrong as wrong:
        check.status, check.evidence = Status.FAILED, str(wrong)
        check.place, check.measures, check.ran = wrong.place, wrong.measures, wrong.ran
    except CheckFailed as failed:
        check.status, check.evidence = Status.FAILED, str(failed)
    except TruelineError as error:
        check.status, check.evidence = Status.ERROR, str(error)
    except Exception as error:
        check.status, check.evidence = Status.ERROR, described(error)
    check.seconds = time.perf_counter() - start
    return check
