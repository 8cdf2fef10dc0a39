"""What runs the core's steps. The core knows requests, blocks and slots; an executor has the model,
its caches and its devices. The two exchange plain messages only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from trueline.engine.messages import Admission, StepMessage, StepResult, Unowned
from trueline.engine.results import StepHandle
from trueline.engine.runner import Runner
from trueline.grammar.guide import Guide

Handle = TypeVar("Handle")
"""What a launched step is known by until it is collected."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """In place of a result."""

    error: BaseException


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Executor(Protocol[Handle]):
    """Steps execute in the order in which they are launched."""

    def admit(self, admission: Admission) -> None:
        """Called once for each request, before any step has a row of it."""

    def constrain(self, id: int, guide: Guide) -> None:
        """Of a request just admitted. Its guide stays where the first rank is: of what the ranks
        draw, that one's counts."""

    def poison(self, unowned: Unowned) -> None:
        """Before the next launch, and after those before it: NaN in what nobody owns."""

    def launch(self, step: StepMessage) -> Handle:
        """Does not wait for the step. If it raises, the step has failed and is not collected."""

    def collect(self, launched: Handle) -> StepResult | StepFailed:
        """Waits. Raises only what interrupts the waiting, as Ctrl-C: the step is then still in
        flight."""

    @property
    def alarm(self) -> HasFileno | None:
        """Readable when `check` would raise; None: it never does."""

    def check(self) -> None:
        """Raises where the executor cannot go on although no step runs."""

    @property
    def num_canary_checks(self) -> int:
        """Whose outcome is known."""

    def last_check(self) -> None:
        """Of the canaries, after the last step; raises CanaryHit."""

    def close(self) -> None: ...


AnyExecutor: TypeAlias = Executor[Any]


Launched = Future[StepResult] | StepHandle


class LocalExecutor:
    """One rank in this process. A GPU runs launched kernels by itself; on a CPU a thread computes
    the step where the core is to schedule the next one meanwhile (`threaded`)."""

    def __init__(
        self, runner: Runner, *, threaded: bool, on_step: Callable[[], None] = lambda: None
    ) -> None:
        """`on_step` is called before each step, in the thread that computes it."""
        self.runner, self._on_step = runner, on_step
        self.threaded = threaded
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="trueline-runner")
        self._unowned: Unowned | None = None
        self.alarm = None

    def check(self) -> None:
        pass

    def admit(self, admission: Admission) -> None:
        self.runner.admit(admission)

    def constrain(self, id: int, guide: Guide) -> None:
        self.runner.constrain(id, guide)

    def poison(self, unowned: Unowned) -> None:
        self._unowned = unowned

    def launch(self, step: StepMessage) -> Launched:
        unowned, self._unowned = self._unowned, None
        if self.threaded:
            return self.worker.submit(self._execute, step, unowned)
        return self._launch(step, unowned)

    def collect(self, launched: Launched) -> StepResult | StepFailed:
        if isinstance(launched, Future):
            error = launched.exception()
            return launched.result() if error is None else StepFailed(error)
        try:
            return launched.result()
        except Exception as failed:
            return StepFailed(failed)

    @property
    def num_canary_checks(self) -> int:
        return self.runner.canaries.num_checks if self.runner.canaries else 0

    def last_check(self) -> None:
        self.worker.submit(self.runner.last_check).result()  # after what is under way

    def close(self) -> None:
        self.worker.shutdown(wait=True)

    def _execute(self, step: StepMessage, unowned: Unowned | None) -> StepResult:
        return self._launch(step, unowned).result()

    def _launch(self, step: StepMessage, unowned: Unowned | None) -> StepHandle:
        try:
            self._on_step()
            if unowned is not None:
                self.runner.poison(unowned)
            return self.runner.launch(step)
        except BaseException:
            self.runner.failed()
            raise


def local_runner(executor: AnyExecutor) -> Runner:
    """For checks and benchmarks that look inside the model; of several ranks, rank 0's."""
    local = getattr(executor, "local", executor)
    assert isinstance(local, LocalExecutor), "the model is in other processes"
    return local.runner
