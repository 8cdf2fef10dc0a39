"""Executors of rank 0, and of every rank under torchrun: the same step on all ranks.

After an error in a step on any rank the engine is broken: ranks that wait for it in an exchange
cannot be told from ranks that have gone on."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trueline.engine.executor import Launched, LocalExecutor, StepFailed
from trueline.engine.messages import Admission, StepMessage, StepResult, Unowned
from trueline.engine.ranks.orders import Order, encode
from trueline.engine.ranks.processes import Alarm, Workers, how_it_ended
from trueline.errors import EngineBroken, described
from trueline.grammar.guide import Guide
from trueline.parallel.group import SECONDS_BETWEEN_LOOKS, RankFailed, RankGroup

SECONDS_TO_HEAR = 5.0
"""For why a rank has ended, once an exchange with it has failed."""


SECONDS_BETWEEN_CHECKS = 1.0
"""Whether a step runs."""


class _Together:
    """One rank's part of an engine: the step that all ranks have been told, executed here."""

    def __init__(self, local: LocalExecutor, group: RankGroup, timeout: float) -> None:
        """`timeout`: seconds that a step may take, 0 for no limit."""
        self.local, self.group = local, group
        self._admissions: list[Admission] = []
        self._unowned: Unowned | None = None
        give_up = weakref.WeakMethod(self._give_up)
        self._watch = Watch(timeout, lambda seconds: act(seconds) if (act := give_up()) else None)
        self._hung: str | None = None
        self._lost: RankFailed | None = None

    def admit(self, admission: Admission) -> None:
        self.local.admit(admission)
        self._admissions.append(admission)

    def constrain(self, id: int, guide: Guide) -> None:
        self.local.constrain(id, guide)

    def poison(self, unowned: Unowned) -> None:
        self.local.poison(unowned)
        self._unowned = unowned

    def launch(self, step: StepMessage) -> Launched:
        order = Order(
            admissions=self._admissions,
            unowned=self._unowned,
            step=step,
            probed=self.local.runner.probe is not None,
        )
        self._admissions, self._unowned = [], None
        try:
            with self._watch.waiting():
                self._agree(encode(order))
                return self.local.launch(step)
        except Exception as error:
            raise self._failed(error) from error

    def collect(self, launched: Launched) -> StepResult | StepFailed:
        with self._watch.waiting():
            outcome = self.local.collect(launched)
        if isinstance(outcome, StepFailed):
            return StepFailed(self._failed(outcome.error))
        return outcome

    @property
    def num_canary_checks(self) -> int:
        """By this rank."""
        return self.local.num_canary_checks

    def last_check(self) -> None:
        """The others do so when they end."""
        self.local.last_check()

    def _agree(self, order: bytes) -> None:
        """All ranks execute the same."""
        raise NotImplementedError

    def _failed(self, error: BaseException) -> RankFailed:
        """The engine is broken, by whatever came first."""
        raise NotImplementedError

    def _give_up(self, seconds: float) -> None:
        """In the watch's thread: whoever waits gets an error."""
        self._hung = hung(self.group, seconds)
        self.group.abort()


class RanksExecutor(_Together):
    """Rank 0: tells the others what to do, and does its own part."""

    def __init__(
        self, local: LocalExecutor, group: RankGroup, processes: Workers, timeout: float
    ) -> None:
        super().__init__(local, group, timeout)
        self.processes = processes
        group.when_reported(processes.alarm.ring)
        # also when nobody closes it: other machines hear of a regular end
        self._end = weakref.finalize(self, _end, self._watch, group, processes, local)

    @property
    def alarm(self) -> Alarm:
        return self.processes.alarm

    def check(self) -> None:
        if self._lost is None and (self.processes.deaths() or self.group.reported()):
            raise self._failed(RankFailed("a rank has ended"))

    def close(self) -> None:
        self._end()

    def _agree(self, order: bytes) -> None:
        self.group.control.tell(order)

    def _failed(self, error: BaseException) -> RankFailed:
        if self._lost is None:
            why = self._hung or why_it_failed(self.group, self.processes, error)
            self._lost = RankFailed(why)
            self.processes.kill()
            self.group.abort()
        return self._lost

    def _give_up(self, seconds: float) -> None:
        self._hung = hung(self.group, seconds)
        self.processes.kill()
        self.group.abort()


def _end(watch: Watch, group: RankGroup, processes: Workers, local: LocalExecutor) -> None:
    watch.stop()
    if not group.aborted:
        with suppress(RuntimeError):  # one is gone already
            group.control.tell(encode(Order()))
            processes.wait()
    processes.kill()
    local.close()
    group.close()
    processes.close()


def hung(group: RankGroup, seconds: float) -> str:
    return f"no step ended within {seconds:g} s (engine_timeout): {group.behind()}"


def why_it_failed(group: RankGroup, processes: Workers, error: BaseException) -> str:
    """What another rank says, what became of its process, or else our own error."""
    ours = not isinstance(error, RuntimeError) or isinstance(error, EngineBroken)
    end = time.monotonic() + (0.0 if ours else SECONDS_TO_HEAR)
    while not (deaths := processes.deaths(SECONDS_BETWEEN_LOOKS)) and not group.reported():
        if time.monotonic() > end:
            break
    if (reported := group.reported()) is not None:
        return reported
    for rank, code in deaths:
        return f"rank {rank} {how_it_ended(code)}"
    return f"rank {group.place.rank}: {described(error)}"


class LaunchedExecutor(_Together):
    """Under torchrun every rank runs the same program, and so schedules the same steps. Rank 0's
    count: who would do something else is told so, not left waiting in an exchange."""

    def __init__(self, local: LocalExecutor, group: RankGroup, timeout: float) -> None:
        """Rank 0 watches how long a step takes."""
        super().__init__(local, group, timeout if group.place.rank == 0 else 0.0)
        self.alarm = None

    def check(self) -> None:
        pass  # torchrun ends all when one ends

    def close(self) -> None:
        self._watch.stop()
        self.local.close()
        self.group.close()

    def _agree(self, order: bytes) -> None:
        if self.group.place.rank == 0:
            self.group.control.tell(order)
        elif self.group.control.hear() != order:
            raise RankFailed(
                "it has scheduled another step than rank 0: under torchrun every rank must ask for "
                "the same, in the same order"
            )

    def _failed(self, error: BaseException) -> RankFailed:
        """The first rank that fails says why, to all."""
        if self._lost is None:
            words = str(error) if isinstance(error, EngineBroken) else described(error)
            self.group.report(words)
            self._lost = RankFailed(self._hung or self.group.reported() or words)
            self.group.abort()
        return self._lost


class Watch:
    """Calls `act` once when somebody has waited longer than `seconds`."""

    def __init__(self, seconds: float, act: Callable[[float], None]) -> None:
        self._seconds, self._act = seconds, act
        self._changed = threading.Condition()
        self._since: float | None = None
        self._stopped = not seconds
        self._thread = threading.Thread(target=self._run, name="trueline-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._set(time.monotonic())
        try:
            yield
        finally:
            self._set(None)

    def stop(self) -> None:
        """Returns when it has ended, or done what it does."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _set(self, since: float | None) -> None:
        """Wakes nobody: twice a step that would take longer than looking now and then. Who looks
        sees this step before it has taken too long, and then waits until it has."""
        with self._changed:
            self._since = since

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                wait = min(self._seconds / 4, SECONDS_BETWEEN_CHECKS)
                if self._since is not None:
                    wait = self._since + self._seconds - time.monotonic()
                if wait <= 0:
                    break
                self._changed.wait(wait)
            if self._stopped:
                return
            self._stopped = True
        self._act(self._seconds)
