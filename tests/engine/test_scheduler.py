"""The scheduler's rules, each by example, with the exact rows."""

from __future__ import annotations

import pytest

from simulation import Simulation, shown
from trueline.engine.request import Request, RequestState
from trueline.engine.scheduler_config import SchedulerConfig, SchedulerError
from trueline.errors import RequestRejected, TruelineError, UsageError

# Tokens known, tokens computed


def test_a_request_from_prompt_to_end() -> None:
    sim = Simulation()
    request = sim.add("a", 5, new=3)
    assert sim.step() == ["a[0:5] prefill*"]
    assert sim.step() == ["a[5:6] decode*"]
    assert sim.step() == ["a[6:7] decode*"]
    assert (request.state, request.num_generated) == (RequestState.ENDED, 3)
    assert sim.dispatch() is None
    assert not sim.scheduler.has_unfinished()
    sim.drain()


def test_a_prompt_of_one_token_is_prefill() -> None:
    sim = Simulation()
    sim.add("a", 1)
    assert sim.step() == ["a[0:1] prefill*"]
    assert sim.step() == ["a[1:2] decode*"]


def test_long_prompts_come_in_chunks_and_only_the_last_samples() -> None:
    sim = Simulation(budget=8)
    sim.add("a", 21)
    assert sim.step() == ["a[0:8] prefill"]
    assert sim.step() == ["a[8:16] prefill"]
    assert sim.step() == ["a[16:21] prefill*"]
    assert sim.step() == ["a[21:22] decode*"]


def test_a_tail_of_one_token_is_a_decode_row_that_reads_the_prompt() -> None:
    sim = Simulation(budget=8)
    request = sim.add("a", 9)
    assert sim.step() == ["a[0:8] prefill"]
    assert request.num_tokens == request.num_prompt_tokens
    assert sim.step() == ["a[8:9] decode*"]


def test_one_token_in_the_middle_of_a_prompt_is_prefill() -> None:
    sim = Simulation(budget=8)
    sim.add("a", 7)
    sim.add("b", [50, 51, 52, 53])
    sim.step()
    assert [sim.by_request[r].request.num_computed for r in sim.by_request] == [7, 1]
    sim = Simulation(budget=2, seats=2)
    sim.add("a", 1, new=9)
    sim.add("b", range(50, 54), new=2)
    assert sim.step() == ["a[0:1] prefill*", "b[0:1] prefill"]
    assert sim.step() == ["a[1:2] decode*", "b[1:2] prefill"]
    assert sim.step() == ["a[2:3] decode*", "b[2:3] prefill"]
    assert sim.step() == ["a[3:4] decode*", "b[3:4] decode*"]


def test_mixed_steps_decode_first_then_prefill_in_order() -> None:
    sim = Simulation(budget=10)
    sim.add("a", 4, new=9)
    sim.add("b", range(20, 23), new=9)
    assert sim.step() == ["a[0:4] prefill*", "b[0:3] prefill*"]
    sim.add("c", range(40, 57))
    sim.add("d", 5)
    assert sim.step() == ["a[4:5] decode*", "b[3:4] decode*", "c[0:8] prefill"]
    assert sim.step() == ["a[5:6] decode*", "b[4:5] decode*", "c[8:16] prefill"]
    # the tail of c joins the decode rows and leaves the rest of the budget to d, which finds
    # the first block of a
    step = ["a[6:7] decode*", "b[5:6] decode*", "c[16:17] decode*", "d[4:5] decode*"]
    assert sim.step() == step
    sim.drain()


def test_an_older_prefill_comes_before_a_younger_one_but_after_all_decodes() -> None:
    sim = Simulation(budget=6, seats=3)
    sim.add("long", range(100, 120))
    assert sim.step() == ["long[0:6] prefill"]
    sim.add("short", 3, priority=-1)
    assert sim.step() == ["long[6:12] prefill"]  # it was here first, and a step has one budget
    assert sim.step() == ["long[12:18] prefill"]
    assert sim.step() == ["long[18:20] prefill*", "short[0:3] prefill*"]
    # in order of (priority, arrival), not of admission
    assert sim.step() == ["short[3:4] decode*", "long[20:21] decode*"]


def test_seats_limit_the_running_requests() -> None:
    sim = Simulation(seats=2)
    for name in "abc":
        sim.add(name, 2, new=2)
    assert sim.step() == ["a[0:2] prefill*", "b[0:2] prefill*"]
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 1)
    assert sim.step() == ["a[2:3] decode*", "b[2:3] decode*"]
    assert sim.step() == ["c[0:2] prefill*"]


def test_max_model_len_ends_a_request() -> None:
    sim = Simulation(max_len=8)
    request = sim.add("a", 6, new=100)
    assert sim.step() == ["a[0:6] prefill*"]
    assert sim.step() == ["a[6:7] decode*"]
    assert (request.state, request.num_tokens) == (RequestState.ENDED, 8)
    assert sim.clients[0].outcome == "length"


def test_the_config_is_checked() -> None:
    with pytest.raises(UsageError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        SchedulerConfig(max_num_batched_tokens=4, max_num_seqs=8, max_model_len=64)
    with pytest.raises(UsageError, match="max_model_len=0"):
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8, max_model_len=0)


# Running ahead


def test_the_next_step_may_go_out_before_the_last_is_collected() -> None:
    sim = Simulation()
    request = sim.add("a", 5, new=3)
    assert shown(sim.dispatch()) == ["a[0:5] prefill*"]
    assert (request.num_tokens, request.num_generated, request.num_in_flight) == (6, 0, 1)
    assert shown(sim.dispatch()) == ["a[5:6] decode*"]
    sim.collect()
    assert (request.num_tokens, request.num_generated, request.num_in_flight) == (7, 1, 1)
    assert shown(sim.dispatch()) == ["a[6:7] decode*"]
    # all three tokens are known or promised: nothing is left to schedule
    assert sim.dispatch() is None
    assert sim.collect() == []
    assert sim.dispatch() is None
    assert sim.collect() == ["a"]
    sim.drain()


def test_an_end_token_found_one_step_late_costs_a_row_and_nothing_else() -> None:
    sim = Simulation()
    request = sim.add("a", 4, new=9, ends_after=1)
    sim.dispatch()
    sim.dispatch()
    sim.collect()
    assert (request.state, request.num_in_flight) == (RequestState.ENDED, 1)
    # its last step may still write them
    assert len(request.tables[0]) == 2
    assert sim.pool.num_free == sim.pool.num_usable - 2
    sim.check()
    assert sim.scheduler.has_unfinished()
    sim.collect()
    assert request.num_generated == 1
    assert request.tables == []
    sim.drain()


def test_steps_are_collected_in_order_and_once() -> None:
    sim = Simulation()
    sim.add("a", 4)
    first, second = sim.dispatch(), sim.dispatch()
    assert first is not None
    assert second is not None
    with pytest.raises(SchedulerError, match="in the order"):
        sim.scheduler.collected(second)
    with pytest.raises(SchedulerError, match=r"not in the step: \['x'\]"):
        sim.scheduler.collected(first, ["x"])
    sim.collect()
    with pytest.raises(SchedulerError, match="once each"):
        sim.scheduler.collected(first)
    sim.drain()


# Prefix hits


def test_a_second_request_shares_the_blocks_of_the_first() -> None:
    sim = Simulation()
    first = sim.add("a", 10, new=9)
    sim.step()
    second = sim.add("b", 10)
    assert sim.step() == ["a[10:11] decode*", "b[8:10] prefill*"]
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.num_cached_tokens == 8
    assert (sim.pool.num_query_tokens, sim.pool.num_hit_tokens) == (20, 8)
    sim.drain()


@pytest.mark.parametrize(("length", "hit"), [(7, 4), (8, 4), (9, 8), (12, 8), (3, 0), (4, 0)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    sim = Simulation()
    sim.add("a", 12, new=1)
    sim.step()
    request = sim.add("b", length, new=1)
    kind = "decode" if length == hit + 1 else "prefill"
    assert sim.step() == [f"b[{hit}:{length}] {kind}*"]
    assert request.num_cached_tokens == hit
    sim.drain()


def test_nothing_is_shared_before_the_step_that_wrote_it_is_collected() -> None:
    sim = Simulation()
    sim.add("a", 8, new=9)
    sim.dispatch()
    sim.add("b", 9)
    assert shown(sim.dispatch()) == ["a[8:9] decode*", "b[0:9] prefill*"]
    sim.collect()
    sim.add("c", 9)
    step = shown(sim.dispatch())
    assert step == ["a[9:10] decode*", "b[9:10] decode*", "c[8:9] decode*"]
    sim.drain()


def test_generated_blocks_are_shared_and_wait_for_their_hash() -> None:
    sim = Simulation()
    request = sim.add("a", 6, new=4)
    for _ in range(4):
        hashes, request.block_hashes = request.block_hashes, []
        step = sim.dispatch()
        assert step is not None
        request.block_hashes = hashes
        sim.collect()
    # 6 + 4 tokens, the last of them never written: two full blocks
    assert len(sim.pool.lookup(request.block_hashes)) == 2
    follow_up = sim.add("b", [*sim.clients[0].tokens, 77])
    assert sim.step() == ["b[8:11] prefill*"]
    assert follow_up.num_cached_tokens == 8


def test_a_hash_that_comes_late_is_registered_late() -> None:
    sim = Simulation()
    request = sim.add("a", 8, new=4)
    hashes, request.block_hashes = request.block_hashes, []
    step = sim.dispatch()
    assert step is not None
    sim.pending.clear()
    sim.scheduler.collected(step)
    assert sim.pool.lookup(hashes) == []
    request.block_hashes = hashes
    step = sim.scheduler.schedule()
    assert step is not None
    sim.scheduler.collected(step)
    assert sim.pool.lookup(hashes) == request.tables[0][:2]


def test_who_does_not_read_the_cache_still_feeds_it() -> None:
    sim = Simulation()
    sim.add("a", 9, new=1, read_prefix_cache=False)
    assert sim.step() == ["a[0:9] prefill*"]
    sim.add("b", 9, new=1, read_prefix_cache=False)
    assert sim.step() == ["b[0:9] prefill*"]
    assert sim.pool.num_query_tokens == 0
    sim.add("c", 9, new=1)
    assert sim.step() == ["c[8:9] decode*"]


def test_after_a_reset_old_contents_never_come_back() -> None:
    sim = Simulation()
    sim.add("a", 8, new=20)
    sim.step()
    sim.pool.reset_prefix_cache()
    for _ in range(8):
        sim.step()
    sim.add("b", 8)
    assert "b[0:8] prefill*" in sim.step()
    sim.add("c", 9)
    assert "c[8:9] decode*" in sim.step()
    sim.drain()


def test_what_was_computed_before_a_reset_is_not_found_behind_a_new_head() -> None:
    """The blocks a request fills after a reset follow on blocks of the old weights."""
    sim = Simulation()
    sim.add("a", 8, new=13)
    sim.step()
    sim.pool.reset_prefix_cache()
    for _ in range(12):
        sim.step()
    tokens = sim.clients[0].tokens
    assert len(tokens) >= 20
    sim.add("b", tokens[:9], new=1)
    assert sim.step() == ["b[0:9] prefill*"]
    again = sim.add("c", [*tokens[:20], 77])
    assert sim.step() == ["c[8:21] prefill*"]
    assert again.num_cached_tokens == 8
    sim.drain()


# At the door


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        (64, 1, "the prompt has 64 tokens, max_model_len=64 leaves room for 63"),
        (0, 4, "0 prompt tokens and max_new_tokens=4"),
        (4, 0, "max_new_tokens=0"),
        (10, 12, r"need 6 cache blocks of 4, the pool has 5; lower max_new_tokens"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: int, new: int, words: str) -> None:
    sim = Simulation(num_blocks=6)
    with pytest.raises(RequestRejected, match=words) as caught:
        sim.scheduler.add(Request("r", prompt, new))
    assert isinstance(caught.value, TruelineError)
    assert "request 'r'" in str(caught.value)
    assert sim.scheduler.counters.num_rejected == 1
    assert not sim.scheduler.has_unfinished()


def test_what_just_fits_is_taken() -> None:
    sim = Simulation(num_blocks=6)
    sim.add("a", 10, new=11)  # the last token is never written: 20 positions, 5 blocks
    sim.drain(lag=1)
    sim = Simulation(num_blocks=17)
    sim.add("a", 63, new=1)
    sim.drain()


def test_ids_are_unique_among_the_living() -> None:
    sim = Simulation()
    request = sim.add("a", 4)
    with pytest.raises(RequestRejected, match="request_id is in use"):
        sim.add("a", 4)
    with pytest.raises(SchedulerError, match="added before"):
        sim.scheduler.add(request)
    sim.dispatch()
    assert sim.abort("a")
    sim.add("a", 5)  # the old one still drains
    sim.dispatch()
    sim.collect()
    sim.check()
    sim.drain(lag=1)


# Priority


def test_lower_priority_values_go_first_then_arrival() -> None:
    sim = Simulation(seats=1, budget=8)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        sim.add(name, 2, new=1, priority=priority)
    assert [sim.step()[0][0] for _ in range(4)] == ["d", "b", "c", "a"]


@pytest.mark.parametrize("level", [1, 3])
def test_waiting_wins_in_the_end(level: int) -> None:
    """A stream of better requests fills the only seat; the worse one waits `level` agings."""
    sim = Simulation(seats=1, aging=10)
    request = sim.add("old", 2, new=1, priority=level)
    for number in range(100):
        sim.add(f"new {number}", 2, new=1)
        sim.step()
        if request.state is RequestState.ENDED:
            break
    assert number == 10 * level  # equal by now, and it arrived first
    sim.drain()
