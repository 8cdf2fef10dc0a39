"""How long a run will take, told before its checks begin: from a composition that the engine has
run, one layer of the definition and its head, all timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueline.verify.report.wording import seconds
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.definition import EXACT
from trueline.verify.suite.judgement import Judgement
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.outcome import Todo
from trueline.verify.suite.power import ANSWER, INJECTIONS, PROMPT, TRIES

OP_SECONDS, GPU_OP_SECONDS = 0.2, 3.0
"""Of a check of an op, in the mean: they depend on the machine (0.09 on two idle cores, 0.6 beside
other work), and little on the model. On a GPU kernels are compiled at the checks' dims first."""
LEAST = 0.5
"""Of what the timed request takes: a short one is no cheaper."""
NOISE = 6
"""Evaluations of a layer that its noise takes: two forms in another dtype, a forward of its own in
both, scores of choices."""


@dataclass(frozen=True)
class Estimate:
    engine: float = 0.0
    definition: float = 0.0
    ops: float = 0.0
    power: float = 0.0

    @property
    def total(self) -> float:
        return self.engine + self.definition + self.ops + self.power

    def __str__(self) -> str:
        parts = ("engine", "definition", "ops", "power")
        told = ", ".join(
            f"{part} {seconds(value)}" for part in parts if (value := getattr(self, part))
        )
        return f"about {seconds(self.total)} ({told})"


@dataclass(frozen=True)
class Pace:
    step: float
    """Seconds of a step of the engine, watched."""
    read: float
    """Of reading a layer of the definition, in float64 and in the model's dtype."""
    layer: float
    """Of one request through a layer that is in memory."""
    head: float
    """Of what a request takes once, however many layers there are: its logits above all, which
    with a large vocabulary take longer than a layer."""
    tokens: int
    """Of that request."""


def estimate(
    numbers: Numbers, todos: Sequence[Todo], tier: Sequence[Composition], *, with_power: bool
) -> Estimate | None:
    """None where nothing can be timed: a check tells why. `tier`: its compositions, of which those
    are run that `todos` ask for."""
    asked = {todo.id for todo in todos}
    each_op = GPU_OP_SECONDS if numbers.session.plan.device.is_gpu else OP_SECONDS
    ops = each_op * sum(each.startswith("ops/") for each in asked)
    first, *others = tier
    wanted = [each for each in others if f"modes/{each.name}" in asked]
    if any(each.startswith(("layers/", "logits/")) for each in asked) or numbers.together:
        wanted.insert(0, first)
    if not wanted:
        return Estimate(ops=ops)
    pace = measure(numbers, first)
    if pace is None:
        return None
    definition = numbers.session.definition
    layers, large = definition.num_layers, definition.room is not None
    sizes = [len(ask.prompt) + ask.max_tokens for each in wanted for ask in each.asks]
    evaluations = NOISE + sum(max(size / pace.tokens, LEAST) for size in sizes)
    power = 0.0
    if with_power:
        judged = (3 * pace.layer + pace.head) * max(PROMPT / pace.tokens, LEAST)
        attempt = pace.step * (ANSWER + 1) + judged
        power = INJECTIONS * (TRIES * attempt + (2 * pace.read if large else 0.0))
    return Estimate(
        engine=pace.step * sum(map(_steps, wanted)),
        definition=layers * pace.read + (layers * pace.layer + pace.head) * evaluations,
        ops=ops,
        power=power,
    )


def _steps(composition: Composition) -> int:
    """At least; a second run where bits are compared, and one alone."""
    most: int = composition.changes.get("max_num_batched_tokens", sys.maxsize)
    steps = max(
        ask.arrives + -(-len(ask.prompt) // most) + ask.max_tokens for ask in composition.asks
    )
    again = composition.same_bits is not None or composition.captured
    return steps * (1 + again) + steps * (composition.alone is not None)


def measure(
    numbers: Numbers, first: Composition, clock: Callable[[], float] = time.perf_counter
) -> Pace | None:
    """Runs the first composition, whose check takes it over, and judges a layer of it."""
    numbers.serve(first)
    ran = numbers.ran.get(first.name)
    if ran is None:
        return None
    judge, definition = numbers.judge, numbers.session.definition
    middle = definition.num_layers // 2

    def timed(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return clock() - start

    def judged(*layers: int) -> float:
        return timed(lambda: judge.judge([ran.requests], [], Judgement(), layers))

    try:
        judged()  # what happens once: the ends are read, a device begins
        head = judged()
        read = timed(lambda: [definition.part(middle, d) for d in (judge.compute, EXACT)])
        judged(middle)  # and what such a layer does once
        layer = max(judged(middle) - head, 0.0)
    except Exception:  # what is broken is told by the check that meets it
        return None
    return Pace(ran.step_seconds, read, layer, head, max(ran.requests.observed[0].count, 1))
