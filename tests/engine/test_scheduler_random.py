"""The scheduler's rules all at once, at random, and the time it takes."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simulation import Simulation, count_opcodes
from spread import diagonal
from trueline.engine.request import Request, RequestState
from trueline.errors import RequestRejected


def prompts(family: int, length: int) -> list[int]:
    """Few distinct prompts that share beginnings: families part ways at position 5."""
    return [p if p < 5 else 100 * family + p for p in range(length)]


# Long answers beside short prompts, because preemption needs requests that outgrow the pool.
newcomers = st.fixed_dictionaries(
    {
        "prompt": st.builds(prompts, st.integers(0, 1), st.integers(1, 9)),
        "new": st.sampled_from([14, 9, 2, 1]),
        "ends_after": st.sampled_from([99, 99, 7, 2]),
        "priority": st.integers(0, 2),
        "read_prefix_cache": st.sampled_from([True, True, True, False]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 3),
        budget=st.integers(4, 12),
        seats=st.integers(1, 4),
        lag=st.integers(0, 1),
        caching=st.sampled_from([True, True, True, False]),
        num_slots=st.sampled_from([9, 5, 3, 2, None]),
        spaced_blocks=st.sampled_from([None, 1, 2]),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
        seed=st.integers(0, 9),
    )
    def start(self, lag: int, spaced_blocks: int | None, **options: Any) -> None:
        self.lag = lag
        spacing = spaced_blocks and spaced_blocks * options["block_size"]
        if options["num_slots"] is not None:  # as many as one request must have
            options["num_slots"] = max(options["num_slots"], 2 + options["num_drafts"])
        self.sim = Simulation(max_len=20, aging=4, spacing=spacing, **options)
        self.num_added = 0

    @rule(group=st.lists(newcomers, min_size=1, max_size=5))
    def add(self, group: list[dict[str, Any]]) -> None:
        pool = self.sim.pool
        for options in group:
            self.num_added += 1
            positions = min(len(options["prompt"]) + options["new"], 20) - 1
            fits = positions <= pool.num_usable * pool.block_size
            try:
                self.sim.add(str(self.num_added), **options)
            except RequestRejected:
                assert not fits
            else:
                assert fits

    @precondition(lambda self: len(self.sim.pending) <= self.lag)
    @rule()
    def dispatch(self) -> None:
        self.sim.dispatch()

    @precondition(lambda self: self.sim.pending)
    @rule()
    def collect(self) -> None:
        self.sim.collect()

    @rule(times=st.integers(1, 20))
    def run(self, times: int) -> None:
        """Several steps, so that runs get far enough for preemption."""
        for _ in range(times):
            self.sim.turn(self.lag)

    @precondition(lambda self: self.sim.clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.sim.clients), label="client")
        alive = client.request.state is not RequestState.ENDED
        assert self.sim.abort(client.request.request_id) == alive

    @rule(die=st.integers(1, 8))
    def reset(self, die: int) -> None:
        if die == 8:  # seldom, or nothing would ever be found
            self.sim.pool.reset_prefix_cache()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain(self.lag)


TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize(
    ("lag", "stateful", "num_drafts"),
    [*diagonal([0, 1, 2], [True, False], [0]), *diagonal([0, 1], [True, False], [3])],
)
def test_a_long_run(lag: int, stateful: bool, num_drafts: int) -> None:
    """Hundreds of turns under pressure: what no short example reaches, in numbers we control."""
    seen: Counter[str] = Counter()
    drafted: set[tuple[int, int]] = set()
    for seed in range(40):
        dice = Random(100 * lag + seed)
        sim = Simulation(
            num_blocks=39 // (block_size := dice.randint(1, 3)) + dice.randint(2, 5),
            block_size=block_size,
            budget=dice.randint(4, 12),
            seats=dice.randint(3, 4),
            max_len=40,
            aging=4,
            num_slots=num_drafts + dice.randint(2, 14) if stateful else None,
            spacing=block_size * dice.randint(1, 4),
            num_drafts=num_drafts,
            seed=seed,
        )
        for turn in range(150):
            if dice.random() < 0.3 and sim.scheduler.num_waiting < 4:
                add_at_random(sim, str(turn), dice)
            alive = [r for r in sim.by_request if r.state is not RequestState.ENDED]
            seen.update(request.state.value for request in alive)
            if alive and dice.random() < 0.05:
                victim = min(alive, key=lambda r: (r.state.value != "preempted", dice.random()))
                seen[f"aborted while {victim.state.value}"] += 1
                sim.abort(victim.request_id)
            if dice.random() < 0.01:
                sim.pool.reset_prefix_cache()
            sim.turn(lag)
        sim.drain(lag)
        seen["preemptions"] += sim.scheduler.counters.num_preemptions
        seen["evictions"] += sim.pool.num_evictions
        drafted |= sim.accepted.keys()
        seen["hits"] += sum(r.num_cached_tokens > 0 for r in sim.by_request)
        if sim.slots:
            seen["snapshots evicted"] += sim.slots.num_evictions
            seen["snapshots skipped"] += sim.slots.num_skipped
    events = ["preemptions", "evictions", "hits", "aborted while running", "waiting"]
    if stateful:
        events += ["snapshots evicted", "snapshots skipped"]
    for event in events:
        assert seen[event] > 100, f"the run was too tame: {seen}"
    assert drafted == {(n, right) for n in range(num_drafts + 1) for right in range(n + 1)}
    if lag:
        assert seen["preempted"] > 30, f"the run was too tame: {seen}"


def add_at_random(sim: Simulation, name: str, dice: Random) -> None:
    prompt = prompts(dice.randint(0, 1), dice.randint(1, 9))
    if sim.clients and dice.random() < 0.2:  # the next turn of a chat
        history = dice.choice(sim.clients).tokens
        prompt = [*history, *prompt][:20]
    sim.add(
        name,
        prompt,
        dice.choice([30, 15, 2]),
        ends_after=dice.choice([99, 99, 20, 2]),
        priority=dice.randint(0, 2),
        read_prefix_cache=dice.random() < 0.9,
    )


# Time


class CountedPriority(int):
    """Comparing it executes Python, so that sorting or scanning in C is counted as well."""

    def __mul__(self, other: int) -> CountedPriority:
        return CountedPriority(int(self) * other)

    def __add__(self, other: int) -> CountedPriority:
        return CountedPriority(int(self) + other)

    def __lt__(self, other: int) -> bool:
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        return int(self) == int(other)  # type: ignore[call-overload, no-any-return]

    def __hash__(self) -> int:
        return hash(int(self))


# case: (blocks, seats, new tokens of those who wait, slots); 32 requests run throughout
QUEUES = {
    "no seat is free": (4_000, 32, 1, None),
    "no blocks are free": (80, 64, 48, None),
    "one is admitted and ends in every step": (4_000, 33, 1, None),
    "no slot is free": (4_000, 64, 1, 33),
    "one slot is free in every step: one is admitted and ends": (4_000, 64, 1, 34),
}


def cost_of_a_step(num_waiting: int, case: str) -> float:
    """Python instructions of schedule and collected."""
    num_blocks, seats, new, num_slots = QUEUES[case]
    sim = Simulation(
        num_blocks=num_blocks, block_size=16, budget=512, seats=seats, num_slots=num_slots
    )
    scheduler = sim.scheduler

    def turn() -> None:
        step = scheduler.schedule()
        assert step is not None
        scheduler.collected(step)

    for number in range(32):
        scheduler.add(Request(f"running {number}", 16, 40, CountedPriority(0)))
    turn()
    assert scheduler.num_running == 32
    total = 0
    for number in range(num_waiting + 10):
        scheduler.add(Request(f"waiting {number}", 16, new, CountedPriority(0)))
        if number >= num_waiting:
            total += count_opcodes(turn)
    ended = scheduler.counters.num_finished
    assert ended == (10 if "admitted" in case else 0)
    return total / 10


@pytest.mark.parametrize("case", QUEUES)
def test_a_long_queue_costs_nothing(case: str) -> None:
    one, many = cost_of_a_step(1, case), cost_of_a_step(10_000, case)
    assert many <= 2 * one, f"{one:.0f} instructions with 1 waiting, {many:.0f} with 10,000"
