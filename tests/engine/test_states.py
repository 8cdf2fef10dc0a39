"""State slots and snapshots, each rule by example. The simulation checks every state it sees."""

from __future__ import annotations

import pytest

from simulation import Simulation, show_row, shown
from trueline.cache.pool import PoolError
from trueline.cache.slots import SlotPool, StateSlots
from trueline.engine.request import RequestState
from trueline.engine.step import Row
from trueline.errors import UsageError


class Stateful(Simulation):
    """A simulation that surely has slots."""

    slots: SlotPool

    def __init__(self, num_slots: int = 17, **options: object) -> None:
        super().__init__(num_slots=num_slots, **options)  # type: ignore[arg-type]

    def row(self, name: str) -> Row:
        """Of a request in the newest step."""
        return next(r for r in self.pending[-1].step.rows if r.request.request_id == name)

    def state(self, name: str) -> StateSlots:
        state = self.row(name).state
        assert state
        return state

    def kept(self, tokens: list[int]) -> list[int]:
        """Lengths of the prefixes of `tokens` that have a snapshot."""
        size = self.pool.block_size
        found = [self.slots.find(value) is not None for value in self._hashes(tokens, [])]
        return [(index + 1) * size for index, there in enumerate(found) if there]


def positions(state: StateSlots) -> list[int]:
    return [position for position, _ in state.snapshots]


# The slot a request works in


def test_a_prompt_of_one_token_starts_from_zeros_and_goes_on_from_its_slot() -> None:
    sim = Stateful()
    sim.add("a", 1, new=2)
    sim.dispatch()
    first = sim.state("a")
    assert first == StateSlots(first.slot, None, ())
    sim.dispatch()
    assert sim.state("a") == StateSlots(first.slot, first.slot, ())
    sim.drain()


def test_chunks_go_on_from_the_slot() -> None:
    sim = Stateful(budget=5, seats=2, caching=False)
    sim.add("a", 12)
    for source in (None, 1, 1):
        sim.dispatch()
        assert sim.state("a") == StateSlots(1, source, ())
    sim.drain()


def test_a_slot_just_freed_by_another_starts_from_zeros() -> None:
    sim = Stateful(num_slots=2, caching=False)
    sim.add("a", 5, new=2)
    sim.add("b", 5, new=2)
    sim.dispatch()
    assert shown(sim.pending[-1].step) == ["a[0:5] prefill*"]
    slot = sim.state("a").slot
    sim.collect()
    assert sim.step() == ["a[5:6] decode*"]
    sim.dispatch()
    assert sim.state("b") == StateSlots(slot, None, ())
    sim.drain()


def test_who_keeps_no_state_gets_no_slots() -> None:
    sim = Simulation()
    sim.add("a", 5)
    step = sim.dispatch()
    assert step
    assert step.rows[0].state is None


def test_admission_waits_for_a_slot_in_strict_order() -> None:
    sim = Stateful(num_slots=3)
    for number in range(4):
        sim.add(str(number), range(10 * number, 10 * number + 3), new=2 + number)
    assert sim.step() == ["0[0:3] prefill*", "1[0:3] prefill*"]
    assert sim.step() == ["0[3:4] decode*", "1[3:4] decode*"]
    # 0 is done, and its slot goes to the next in order
    assert sim.step() == ["1[4:5] decode*", "2[0:3] prefill*"]
    assert sim.step() == ["2[3:4] decode*", "3[0:3] prefill*"]
    sim.drain()
    assert sim.scheduler.counters.num_preemptions == 0


def test_pools_and_spacing_are_checked() -> None:
    with pytest.raises(PoolError, match="num_slots=1"):
        Stateful(num_slots=1)
    for spacing in (6, 0, -4):
        with pytest.raises(UsageError, match=f"snapshot_spacing={spacing}: .*block_size=4"):
            Stateful(spacing=spacing)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seats", [4, 16])
def test_two_hundred_requests_pass_through_eight_slots(lag: int, seats: int) -> None:
    sim = Stateful(num_slots=9, seats=seats, spacing=8)
    requests = []
    for number in range(200):
        prompt = [number % 2, *range(1, 2 + number % 13)]
        requests.append(sim.add(str(number), prompt, new=1 + number % 11))
    sim.drain(lag)
    assert all(request.state is RequestState.ENDED for request in requests)
    assert sim.pool.num_hit_tokens > 0


# Which states are kept


def test_without_spacing_the_ends_of_prompt_and_answer_are_kept() -> None:
    sim = Stateful(max_len=64)
    sim.add("a", 14, new=12)
    sim.dispatch()
    assert positions(sim.state("a")) == [12]
    sim.drain()
    # 26 tokens, the last never written; 16 and 20 had to go
    assert sim.kept(sim.clients[0].tokens) == [12, 24]


def test_the_spaced_ones_stay() -> None:
    sim = Stateful(max_len=64, spacing=8, budget=32)
    sim.add("a", 22, new=16)
    sim.dispatch()
    assert positions(sim.state("a")) == [8, 16, 20]
    sim.drain()
    assert sim.kept(sim.clients[0].tokens) == [8, 16, 20, 24, 32, 36]


@pytest.mark.parametrize(
    ("prompt", "kept"), [(1, []), (4, [4]), (5, [4]), (8, [4, 8]), (9, [8]), (13, [12])]
)
def test_the_tail_is_what_a_repetition_can_use(prompt: int, kept: list[int]) -> None:
    sim = Stateful()
    sim.add("a", prompt, new=1)
    sim.dispatch()
    assert positions(sim.state("a")) == kept
    sim.drain()
    again = sim.add("b", prompt, new=1)
    sim.drain()
    assert again.num_cached_tokens == (prompt - 1) // 4 * 4


def test_a_chunk_keeps_only_what_it_reaches() -> None:
    sim = Stateful(budget=6, seats=2, spacing=8)
    sim.add("a", 15)
    seen = []
    for _ in range(3):
        step = sim.dispatch()
        assert step
        seen.append((show_row(step.rows[0]), positions(sim.state("a"))))
    assert seen == [("a[0:6] prefill", []), ("a[6:12] prefill", [8, 12]), ("a[12:15] prefill*", [])]
    sim.drain()


def test_an_answer_keeps_its_latest_block_only() -> None:
    sim = Stateful(max_len=64)
    request = sim.add("a", 3, new=20)
    while request.num_written < 17:
        sim.step()
        whole = request.num_written // 4 * 4
        assert sim.kept(sim.clients[0].tokens) == ([whole] if whole else [])
    sim.drain()


def test_an_answer_does_not_forget_the_end_of_another() -> None:
    sim = Stateful()
    sim.add("short", 6, new=4)
    sim.add("long", 6, new=9)  # says the same, and more
    sim.drain()
    assert sim.kept(sim.clients[1].tokens) == [4, 8, 12]


def test_without_prefix_caching_nothing_is_kept() -> None:
    sim = Stateful(caching=False, spacing=4)
    sim.add("a", 12, new=9)
    sim.dispatch()
    assert sim.state("a").snapshots == ()
    sim.drain()
    assert (sim.slots.num_snapshots, sim.slots.num_skipped) == (0, 0)


def test_who_does_not_read_the_cache_still_feeds_it() -> None:
    sim = Stateful()
    for name, hit in (("a", 0), ("b", 0)):
        request = sim.add(name, 9, new=1, read_prefix_cache=False)
        sim.drain()
        assert request.num_cached_tokens == hit
    reader = sim.add("c", 9, new=1)
    sim.drain()
    assert reader.num_cached_tokens == 8
    assert sim.slots.num_snapshots == 1  # of equal states one is kept


def test_what_cannot_be_named_is_not_kept() -> None:
    sim = Stateful()
    request = sim.add("a", 9, new=9)
    step = sim.dispatch()
    assert step
    request.block_hashes = []  # as the core does for a request whose logits are broken
    sim.pending.clear()
    sim.scheduler.collected(step, ["a"])
    assert sim.slots.num_snapshots == 0
    assert sim.slots.num_free == sim.slots.num_usable


def test_a_reset_forgets_snapshots_also_those_in_flight() -> None:
    sim = Stateful(spacing=4)
    sim.add("a", 9, new=1)
    sim.drain()
    sim.add("b", range(50, 59), new=9)
    sim.dispatch()
    assert positions(sim.state("b")) == [4, 8]
    sim.pool.reset_prefix_cache()
    assert sim.slots.num_snapshots == 0
    sim.collect()
    assert sim.slots.num_snapshots == 0
    while sim.scheduler.has_unfinished():
        step = sim.dispatch()
        if step:
            assert sim.state("b").snapshots == ()
            sim.collect()
    assert sim.slots.num_snapshots == 0
    sim.drain()


# Who gets a slot


def test_snapshots_take_what_is_left_the_longest_first() -> None:
    sim = Stateful(num_slots=4, spacing=4, budget=32)
    sim.add("a", 21, new=1)
    sim.dispatch()
    assert positions(sim.state("a")) == [16, 20]
    assert sim.slots.num_skipped == 3
    sim.drain()


def test_admissions_come_before_snapshots() -> None:
    sim = Stateful(num_slots=4, spacing=4, budget=32, seats=3)
    for number in range(3):
        sim.add(str(number), range(10 * number, 10 * number + 9), new=9)
    assert len(shown(sim.dispatch())) == 3
    assert all(sim.state(str(number)).snapshots == () for number in range(3))
    assert sim.slots.num_skipped == 6
    sim.drain()


@pytest.mark.parametrize("lag", [0, 1])
def test_snapshots_do_not_keep_a_newcomer_waiting(lag: int) -> None:
    """One token a block: the runner wants a snapshot in every step, and has room for one."""
    sim = Stateful(num_slots=3, block_size=1)
    sim.add("a", 1, new=30)
    for _ in range(5):
        sim.turn(lag)
    request = sim.add("b", [77], new=30)
    for _ in range(1 + lag):
        sim.turn(lag)
    assert request.state is RequestState.RUNNING
    sim.drain(lag)


def test_the_least_recently_used_snapshot_goes_first() -> None:
    sim = Stateful(num_slots=4)
    prompts = [list(range(10 * number, 10 * number + 5)) for number in range(3)]
    for number in (0, 1, 0, 2):  # 0 is used again before 2 needs its slot
        sim.add("x", prompts[number], new=1)
        sim.drain()
    assert [sim.kept(prompt) for prompt in prompts] == [[4], [], [4]]
    assert sim.slots.num_evictions == 1


def test_snapshots_are_evicted_with_their_blocks() -> None:
    sim = Stateful(num_blocks=5)
    sim.add("a", 9, new=1)
    sim.drain()
    assert sim.kept(list(range(9))) == [8]
    sim.add("b", range(50, 65), new=1)  # needs all four blocks
    sim.drain()
    assert sim.kept(list(range(9))) == []
    assert sim.slots.num_evictions == 1


# Starting from a snapshot


def test_a_hit_starts_from_the_snapshot_and_then_works_in_its_slot() -> None:
    sim = Stateful()
    sim.add("a", 10, new=1)
    sim.drain()
    (snapshot,) = (slot for slot in range(1, 17) if sim.slots.hash_of(slot))
    sim.add("b", 10, new=3)
    assert shown(sim.dispatch()) == ["b[8:10] prefill*"]
    slot = sim.state("b").slot
    assert slot != snapshot
    assert sim.state("b") == StateSlots(slot, snapshot, ())
    sim.dispatch()  # the row that reads the snapshot is not collected yet
    assert sim.state("b") == StateSlots(slot, slot, ())
    assert sim.slots.references(snapshot) == 1
    sim.collect()
    assert sim.slots.references(snapshot) == 0
    sim.drain()


def test_a_hit_needs_blocks_and_a_snapshot() -> None:
    sim = Stateful(spacing=8)
    sim.add("a", 15, new=1)
    sim.drain()
    assert sim.kept(list(range(15))) == [8, 12]
    hashes = sim.clients[0].request.block_hashes
    sim.slots.forget(hashes[2])
    second = sim.add("b", 15, new=1)
    sim.drain()
    # three blocks are there, but only the state after two; and the third is not shared
    assert second.num_cached_tokens == 8
    sim.slots.forget(hashes[1])
    sim.slots.forget(hashes[2])
    third = sim.add("c", 15, new=1)
    sim.drain()
    assert third.num_cached_tokens == 0
    assert sim.pool.num_hit_tokens == 8


@pytest.mark.parametrize("length", [5, 9, 12])
def test_the_last_state_is_not_used_for_a_shorter_prefix(length: int) -> None:
    sim = Stateful()
    sim.add("a", 14, new=5)
    sim.drain()
    shorter = sim.add("b", length, new=1)
    sim.dispatch()
    assert sim.row("b").start == 0
    assert sim.state("b").source is None
    sim.drain()
    assert shorter.num_cached_tokens == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_chat_finds_its_own_answer(lag: int) -> None:
    sim = Stateful(max_len=64)
    sim.add("turn 1", 6, new=9, ends_after=8)
    sim.drain(lag)
    history = sim.clients[0].tokens
    assert len(history) == 14
    second = sim.add("turn 2", [*history, 77, 78, 79], new=7)
    sim.drain(lag)
    assert second.num_cached_tokens == 12
    history = sim.clients[1].tokens
    third = sim.add("turn 3", [*history, 77], new=7)
    sim.drain(lag)
    assert third.num_cached_tokens == (len(history) - 1) // 4 * 4


def test_equal_prompts_at_once_and_one_after_another() -> None:
    sim = Stateful(budget=64)
    for number in range(4):
        sim.add(str(number), 10, new=6)
    sim.dispatch()
    slots = {sim.state(str(number)).slot for number in range(4)}
    assert len(slots) == 4
    sim.collect()
    assert sim.slots.num_snapshots == 1  # the first one's; the others' are blank again
    assert sim.slots.num_in_use == 4
    late = [sim.add(f"late {number}", 10, new=6) for number in range(3)]
    sim.dispatch()
    assert len({sim.state(request.request_id).source for request in late}) == 1
    assert [request.num_cached_tokens for request in late] == [8, 8, 8]
    sim.drain(lag=1)


def test_a_snapshot_in_use_is_not_evicted() -> None:
    sim = Stateful(num_slots=4, spacing=4)
    sim.add("a", 5, new=1)
    sim.drain()
    sim.add("b", 5, new=9)
    sim.add("c", range(50, 62), new=9)
    sim.dispatch()
    # b's, c's, and the one b reads: nothing is left for the snapshots of c
    assert sim.slots.num_free == 0
    assert sim.state("c").snapshots == ()
    assert sim.kept(list(range(5))) == [4]
    sim.drain()


def test_the_last_free_slot_is_taken_over_with_the_state_in_it() -> None:
    sim = Stateful(num_slots=3)
    sim.add("a", 5, new=1)
    sim.drain()
    sim.add("x", [50, 51], new=9)
    sim.step()
    assert sim.slots.num_free == 1
    request = sim.add("b", 5, new=2)
    sim.dispatch()
    state = sim.state("b")
    assert state.source == state.slot
    assert request.num_cached_tokens == 4
    assert sim.kept(list(range(5))) == []
    assert sim.slots.num_evictions == 1
    sim.drain()


# Preempted, aborted


def test_a_preempted_request_gives_its_slots_back_and_resumes_from_a_snapshot() -> None:
    sim = Stateful(num_blocks=6, spacing=4)
    sim.add("a", 8, new=8)
    request = sim.add("b", range(50, 54), new=8)
    for _ in range(6):
        sim.step()
    assert (request.state, request.num_generated) == (RequestState.WAITING, 5)
    assert sim.slots.num_in_use == 1
    for _ in range(2):
        sim.step()
    # its second block went to a, and the snapshot there with it
    assert shown(sim.dispatch()) == ["b[4:9] prefill*"]
    assert sim.state("b").source not in (None, sim.state("b").slot)
    assert (request.num_cached_tokens, request.num_admissions) == (0, 2)
    sim.drain()


def test_preempted_with_a_snapshot_in_flight() -> None:
    sim = Stateful(num_blocks=6, num_slots=9)
    sim.add("a", 8, new=8)
    request = sim.add("b", range(50, 54), new=8)
    for _ in range(5):
        sim.dispatch()
    assert positions(sim.state("b")) == [8]
    in_flight = {sim.state("b").slot, *(slot for _, slot in sim.state("b").snapshots)}
    sim.dispatch()
    assert request.state is RequestState.PREEMPTED
    assert all(sim.slots.references(slot) == 0 for slot in in_flight)
    while sim.pending:
        sim.collect()
        sim.check()
    assert sim.kept(sim.clients[1].tokens) == []
    sim.drain(lag=1)


def test_an_aborted_request_keeps_its_slots_until_its_last_step_is_collected() -> None:
    sim = Stateful(num_slots=4)
    sim.add("a", 6, new=9)
    sim.dispatch()
    ((_, snapshot),) = sim.state("a").snapshots
    sim.dispatch()
    slot = sim.state("a").slot
    sim.abort("a")
    assert (sim.slots.references(slot), sim.slots.references(snapshot)) == (1, 1)
    sim.collect()
    # what was computed is right all the same, and may be found
    assert sim.kept(list(range(6))) == [4]
    assert (sim.slots.references(slot), sim.slots.references(snapshot)) == (1, 0)
    sim.collect()
    assert sim.slots.num_in_use == 0
    sim.drain()


def test_aborted_while_waiting_for_a_slot() -> None:
    sim = Stateful(num_slots=2)
    sim.add("a", 3, new=4)
    sim.add("b", 3, new=4)
    sim.step()
    assert sim.abort("b")
    sim.drain()
    assert sim.slots.num_in_use == 0
