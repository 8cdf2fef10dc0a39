"""What canaries and poison cost: the same requests decode on while they are switched on and off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from trueline.bench.decoding import decoding, step_seconds
from trueline.engine.canaries.guard import Canaries
from trueline.engine.executor import local_runner
from trueline.errors import UsageError
from trueline.llm import LLMEngine
from trueline.utils.json_types import JSON

OFF, POISON = "off", "poison"
Mode = int | str
"""Steps from one check to the next; or neither canaries nor poison; or poison."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one mode, round by round."""

    mode: str
    batch: int
    step_ms: list[float]
    ratios: list[float]
    """To the time of a step without, in the same round."""
    own: list[float]
    """Share of the time that is spent in the canaries' own code; on a CPU that is all they cost.
    """

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def as_json(self) -> JSON:
        return asdict(self) | {"ratio": self.ratio, "own_share": median(self.own)}


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def measure_canaries(
    engine: LLMEngine, batch: int, modes: Sequence[Mode], rounds: int, steps: int
) -> list[Cost]:
    """`steps` decode steps of each mode in turn, `rounds` times; each round begins with another."""
    modes = [OFF, *modes]
    times: dict[Mode, list[float]] = {mode: [] for mode in modes}
    own: dict[Mode, list[float]] = {mode: [] for mode in modes}
    with decoding(engine, batch):
        for turn in range(rounds):
            first = turn % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                clock = switch(engine, mode)
                # a check or more, the first of which finds nothing known
                warm = mode if isinstance(mode, int) else 1
                times[mode].append(_timed(engine, clock, own[mode], warm, steps))
        switch(engine, OFF)
    return [
        Cost(
            mode=f"every {mode}" if isinstance(mode, int) else mode,
            batch=batch,
            step_ms=[1e3 * each for each in times[mode]],
            ratios=[a / b for a, b in zip(times[mode], times[OFF], strict=True)],
            own=own[mode],
        )
        for mode in modes
    ]


def _timed(engine: LLMEngine, clock: Clock, own: list[float], warm: int, steps: int) -> float:
    step_seconds(engine, warm=0, least=warm)
    before = clock.seconds
    each = step_seconds(engine, warm=0, least=steps)
    own.append((clock.seconds - before) / (each * steps))
    return each


def switch(engine: LLMEngine, mode: Mode) -> Clock:
    """On a running engine, between two steps; the clock runs in what the canaries do."""
    core, clock = engine.core, Clock()
    runner = local_runner(core.executor)
    core.config = replace(core.config, poison=mode == POISON)
    runner.canaries = None
    if isinstance(mode, int):
        plan = runner.plan
        if plan.canaries is None:
            raise UsageError("bench canaries: the engine was loaded without")
        plan = replace(plan, canaries=replace(plan.canaries, interval=mode))
        runner.canaries = guard = Canaries(
            plan, runner.caches, rank=0, padded=runner.graphs is not None
        )
        for name in ("launching", "launched", "poisoned"):
            setattr(guard, name, clock.timed(getattr(guard, name)))
    return clock
