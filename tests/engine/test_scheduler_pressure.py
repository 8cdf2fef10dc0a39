"""When blocks run out and when requests are aborted: who loses what, and when it is free."""

from __future__ import annotations

from simulation import Simulation, shown
from trueline.engine.request import RequestState

# Out of blocks


def test_the_last_in_order_is_preempted_and_comes_back() -> None:
    sim = Simulation(num_blocks=6, caching=False)
    sim.add("a", 8, new=8)
    sim.add("b", range(50, 53), new=8)
    assert sim.step() == ["a[0:8] prefill*", "b[0:3] prefill*"]
    assert sim.step() == ["a[8:9] decode*", "b[3:4] decode*"]
    for _ in range(3):
        sim.step()
    # a holds 3 blocks, b 2: the pool is full, and a needs its fourth
    step = sim.dispatch()
    assert shown(step) == ["a[12:13] decode*"]
    assert step is not None
    assert step.preempted == ("b",)
    sim.collect()
    assert sim.step() == ["a[13:14] decode*"]
    assert sim.step() == ["a[14:15] decode*"]
    # 3 prompt tokens and the 5 generated before, all at once
    assert sim.step() == ["b[0:8] prefill*"]
    assert sim.scheduler.counters.num_preemptions == 1
    sim.drain()


def test_a_preempted_request_finds_its_own_prefix_again() -> None:
    sim = Simulation(num_blocks=6)
    sim.add("a", 8, new=8)
    request = sim.add("b", range(50, 54), new=8)
    for _ in range(6):
        sim.step()
    assert (request.state, request.num_generated) == (RequestState.WAITING, 5)
    for _ in range(2):
        assert sim.step()[0].startswith("a")
    assert sim.step() == ["b[4:9] prefill*"]
    assert (request.num_cached_tokens, request.num_admissions) == (0, 2)
    sim.drain()


def test_whoever_is_last_waits_and_keeps_its_blocks() -> None:
    sim = Simulation(num_blocks=6, caching=False)
    sim.add("a", 5, new=8)
    request = sim.add("b", range(50, 53), new=8)
    for _ in range(6):
        assert len(sim.step()) == 2
    # a has its last block, b needs a third
    assert sim.step() == ["a[10:11] decode*"]
    assert (request.state, len(request.tables[0])) == (RequestState.RUNNING, 2)
    assert sim.step() == ["a[11:12] decode*"]
    assert sim.step() == ["b[8:9] decode*"]
    sim.drain()
    assert sim.scheduler.counters.num_preemptions == 0


def test_preempted_while_in_flight() -> None:
    sim = Simulation(num_blocks=6, caching=False)
    sim.add("a", 8, new=8)
    request = sim.add("b", range(50, 53), new=8)
    for _ in range(5):
        sim.dispatch()
    assert shown(sim.dispatch()) == ["a[12:13] decode*"]
    assert (request.state, request.num_promised) == (RequestState.PREEMPTED, 5)
    sim.check()
    while sim.pending:
        sim.collect()
        sim.check()
    assert (request.state, request.num_generated) == (RequestState.WAITING, 5)
    sim.drain()


def test_waiting_for_blocks_in_flight_beats_preemption() -> None:
    sim = Simulation(num_blocks=7, caching=False)
    for name, first in (("a", 0), ("b", 20), ("c", 40)):
        sim.add(name, range(first, first + 4), new=9)
    sim.dispatch()
    for _ in range(4):
        sim.dispatch()
        sim.collect()
    sim.abort("b")  # its two blocks are free when the step in flight is collected
    assert sim.dispatch() is None  # a and c need a third block; c keeps what it has
    sim.check()
    sim.collect()
    assert shown(sim.dispatch()) == ["a[8:9] decode*", "c[8:9] decode*"]
    assert sim.scheduler.counters.num_preemptions == 0
    sim.drain()


def test_nobody_takes_blocks_past_one_who_waits_for_them() -> None:
    sim = Simulation(num_blocks=22, block_size=1, budget=4, seats=3, caching=False)
    sim.add("c", 1, new=20)
    sim.add("b", 3, new=17)
    sim.dispatch()
    sim.add("a", range(50, 62), new=1, priority=-1)
    for _ in range(4):
        sim.dispatch()
        sim.collect()
    sim.abort("b")
    assert sim.pool.num_free == 1
    assert sim.dispatch() is None  # a, first in order, needs two; c could use the one
    sim.collect()
    assert shown(sim.dispatch()) == ["c[5:6] decode*", "a[8:11] prefill"]
    sim.drain()


def test_a_request_that_only_awaits_its_last_token_is_not_preempted() -> None:
    sim = Simulation(num_blocks=6, caching=False)
    sim.add("a", 8, new=8)
    sim.add("b", range(50, 53), new=5)
    sim.dispatch()
    for _ in range(4):
        sim.dispatch()
        sim.collect()
    assert sim.dispatch() is None  # a needs a block, b has promised its last token
    assert sim.collect() == ["b"]
    assert shown(sim.dispatch()) == ["a[12:13] decode*"]
    assert sim.scheduler.counters.num_preemptions == 0
    sim.drain()


def test_admission_leaves_room_for_those_who_run() -> None:
    sim = Simulation(num_blocks=7, caching=False)
    sim.add("a", 8, new=8)
    sim.step()
    # a holds 2 blocks and will want 4 for the 9 tokens it knows and the next 4: 2 of 6 remain,
    # enough for b's prompt, but not for 3 blocks that it will want before long
    sim.add("b", range(50, 58), new=8)
    sim.add("c", [1], new=2)
    assert sim.step() == ["a[8:9] decode*"]  # and c does not slip past b
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (1, 2)
    sim.drain()
    assert sim.scheduler.counters.num_preemptions == 0


def test_admission_counts_those_admitted_in_the_same_step() -> None:
    sim = Simulation(num_blocks=4, caching=False)
    sim.add("a", 3, new=8)
    sim.add("b", 3, new=8)
    assert sim.step() == ["a[0:3] prefill*"]  # each will want two of the three blocks before long


def test_admission_reserves_nothing_beyond_the_end_of_a_request() -> None:
    sim = Simulation(num_blocks=3, caching=False)
    sim.add("a", 2, new=3)
    sim.add("b", 2, new=3)
    assert sim.step() == ["a[0:2] prefill*", "b[0:2] prefill*"]
    sim.drain()


def test_a_hit_on_idle_blocks_is_not_counted_twice() -> None:
    """Blocks that a newcomer shares are free before and taken after: they cannot serve it twice."""
    sim = Simulation(num_blocks=7)
    sim.add("a", 12, new=1)
    sim.step()
    sim.add("x", range(50, 57), new=9)
    assert sim.step() == ["x[0:7] prefill*"]
    assert sim.pool.num_free == 4
    sim.add("b", 13, new=3)
    assert sim.step() == ["x[7:8] decode*"]
    sim.drain()


# Aborts


def test_abort_in_every_state() -> None:
    sim = Simulation(num_blocks=6, seats=2, caching=False)
    sim.add("running", 8, new=8)
    sim.add("preempted", range(50, 53), new=8)
    sim.add("waiting", 3)
    for _ in range(6):
        sim.dispatch()
    states = [client.request.state.value for client in sim.clients]
    assert states == ["running", "preempted", "waiting"]
    for client in sim.clients:
        assert sim.abort(client.request.request_id)
        assert not sim.abort(client.request.request_id)
        sim.check()
    assert not sim.abort("unknown")
    # no block moves before its last step is collected
    held = len(sim.clients[0].request.tables[0])
    assert held == 4
    for _ in range(5):
        sim.collect()
        assert len(sim.clients[0].request.tables[0]) == held
        assert sim.dispatch() is None
    sim.collect()
    sim.drain()
    assert sim.scheduler.counters.num_aborted == 3


def test_abort_frees_a_request_that_is_not_in_flight_at_once() -> None:
    sim = Simulation()
    sim.add("a", 8, new=8)
    sim.step()
    assert sim.abort("a")
    assert sim.pool.num_free == sim.pool.num_usable
    assert len(sim.pool.lookup(sim.clients[0].request.block_hashes)) == 2


def test_many_aborted_requests_leave_the_queue() -> None:
    sim = Simulation()
    for number in range(100):
        sim.add(str(number), 2, new=1)
    for number in range(99):
        sim.abort(str(number))
    assert sim.scheduler.num_waiting == 1
    assert len(sim.scheduler._waiting._heap) <= 2
    assert sim.step() == ["99[0:2] prefill*"]
