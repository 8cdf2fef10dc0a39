"""The core and the device as the scheduler sees them, with every rule it must keep as an assertion.

The simulated device executes a step as late as it may: when it is collected. What it writes for a
position stands for the cache row there: it depends on all tokens before it and on the weights. So a
row that reads a block freed too early, shared wrongly, or registered before it was written, reads
something else than it should, and the simulation says so. The same number stands for the state
after a position, in the slots of models that keep one.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from trueline.cache.blocks import NULL_BLOCK, BlockPool
from trueline.cache.groups import BlockGroups
from trueline.cache.prefix import hash_blocks, prefix_salt
from trueline.cache.slots import NULL_SLOT, SlotPool, StateSlots
from trueline.engine.request import Request, RequestState
from trueline.engine.scheduler import Scheduler
from trueline.engine.scheduler_config import SchedulerConfig
from trueline.engine.step import Row, Step

LIVE = (RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)


def generated(position: int) -> int:
    """The model always says the same, so that requests share generated blocks too."""
    return 1_000 + position


@dataclass
class Client:
    """What is known about a request outside the scheduler."""

    request: Request
    prompt: list[int]
    tokens: list[int]
    ends_after: int
    """It says its end token as its n-th token."""
    written: list[int]
    """What the device should hold for it, from position 0 on."""
    outcome: str = ""
    drafts: tuple[bool, ...] = ()
    """Of the guesses at its next tokens, whether each is right."""
    most_positions: int = 0
    """That a row of this admission has reached, drafts included."""

    def token(self, position: int) -> int:
        return self.prompt[position] if position < len(self.prompt) else generated(position)

    def cache_row(self, before: int, position: int, weights: int, *, wrong: bool = False) -> int:
        return cache_row(before, -1 if wrong else self.token(position), weights)

    def from_scratch(self, length: int, weights: int) -> list[int]:
        return from_scratch([self.token(position) for position in range(length)], weights)


def cache_row(before: int, token: int, weights: int) -> int:
    return hash((before, token, weights))


def from_scratch(tokens: Sequence[int], weights: int) -> list[int]:
    rows: list[int] = []
    for token in tokens:
        rows.append(cache_row(rows[-1] if rows else 0, token, weights))
    return rows


@dataclass
class Dispatched:
    step: Step
    tables: list[list[int]]
    """Each row's blocks, copied when the step went out."""
    weights: int


class Simulation:
    def __init__(
        self,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        budget: int = 16,
        seats: int = 8,
        max_len: int = 64,
        aging: int = 256,
        caching: bool = True,
        num_slots: int | None = None,
        spacing: int | None = None,
        num_drafts: int = 0,
        seed: int = 0,
    ) -> None:
        self.num_drafts, self.dice = num_drafts, Random(seed)
        self.accepted: Counter[tuple[int, int]] = Counter()  # (drafts, right ones) of rows
        self.pool = BlockPool(num_blocks, block_size, caching)
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            max_model_len=max_len,
            priority_aging_steps=aging,
            snapshot_spacing=spacing,
            num_draft_tokens=num_drafts,
        )
        self.slots = SlotPool(num_slots) if num_slots else None
        self.scheduler = Scheduler(self.config, BlockGroups([self.pool]), self.slots)
        self.clients: list[Client] = []
        self.by_request: dict[Request, Client] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}  # slot -> the state in it
        self.prefixes: dict[bytes, list[int]] = {}  # what each hash stands for
        self.pending: deque[Dispatched] = deque()
        self.lost: set[Request] = set()  # preempted, and not admitted again
        self.num_delivered = 0

    # What the core does

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        new: int = 4,
        *,
        ends_after: int = 10_000,
        **fields: Any,
    ) -> Request:
        tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
        request = Request(name, len(tokens), new, **fields)
        request.block_hashes = self._hashes(tokens, [])
        self.scheduler.add(request)
        client = Client(request, tokens, list(tokens), ends_after, [])
        self.clients.append(client)
        self.by_request[request] = client
        return request

    def _hashes(self, tokens: Sequence[int], previous: list[bytes]) -> list[bytes]:
        size = self.pool.block_size
        hashes = hash_blocks(tokens, size, prefix_salt("tiny"), previous)
        for number, value in enumerate(hashes, 1):
            self.prefixes.setdefault(value, list(tokens[: number * size]))
        return hashes

    def abort(self, name: str) -> bool:
        found = self.scheduler.abort(name)
        for client in self.clients:
            if found and client.request.request_id == name and not client.outcome:
                client.outcome = "aborted"
        return found

    def dispatch(self) -> Step | None:
        self._draft()
        before = {r: (r.num_tokens, r.num_computed, r.num_admissions) for r in self.by_request}
        step = self.scheduler.schedule()
        self._note_lost()
        if step is None:
            alive = [c for c in self.clients if c.request.state in LIVE]
            assert self.pending or not alive, "nothing in flight, nothing scheduled: deadlock"
            return None
        tables = [list(row.request.tables[0]) for row in step.rows]
        self.pending.append(Dispatched(step, tables, self.pool.generation))
        self._check_step(step)
        for row in step.rows:
            self._check_row(row, *before[row.request])
        self._check_admissions(step, before)
        return step

    def _draft(self) -> None:
        for client in self.clients:
            request = client.request
            request.num_drafts = 0
            decodes = request.gap == 1 and not request.num_promised
            if self.num_drafts and decodes and request.state is RequestState.RUNNING:
                request.num_drafts = self.dice.randint(0, self.num_drafts)
                client.drafts = tuple(self.dice.random() < 0.6 for _ in range(request.num_drafts))

    def collect(self) -> list[str]:
        """Execute and collect the oldest step; the ids that ended by length."""
        done = self.pending.popleft()
        for row, table in zip(done.step.rows, done.tables, strict=True):
            self._execute(row, table, done.weights)
        said_end = []
        accepted: dict[int, int] = {}
        for i, row in enumerate(done.step.rows):
            client = self.by_request[row.request]
            if row.samples and row.request.state is not RequestState.ENDED:
                right = num_right(client.drafts[: row.num_drafts])
                self.accepted[row.num_drafts, right] += 1
                accepted[i] = -1
                while accepted[i] < right and row.request.request_id not in said_end:
                    client.tokens.append(generated(len(client.tokens)))
                    self.num_delivered += 1
                    accepted[i] += 1
                    if len(client.tokens) - len(client.prompt) == client.ends_after:
                        said_end.append(row.request.request_id)
                row.request.block_hashes = self._hashes(client.tokens, row.request.block_hashes)
                client.written = client.written[: row.start + row.count - row.num_drafts + right]
        ids = {row.request.request_id: row.request for row in done.step.rows}
        full = self.scheduler.collected(done.step, said_end, accepted)
        for name in said_end:
            self.by_request[ids[name]].outcome = "stop"
        for name in full:
            self.by_request[ids[name]].outcome = "length"
        return list(full)

    def step(self) -> list[str]:
        """One step, not run ahead; its rows as text."""
        step = self.dispatch()
        if step is None:
            return []
        self.collect()
        self.check()
        return shown(step)

    def turn(self, lag: int) -> None:
        """One turn of the loop of a core that runs `lag` steps ahead."""
        while len(self.pending) > lag:
            self.collect()
        if self.dispatch() is None and self.pending:
            self.collect()
        self.check()

    def drain(self, lag: int = 0) -> None:
        """Run to the end, then see that everybody got what was asked and everything is free."""
        work = sum(c.request.token_limit for c in self.clients)
        # each preemption repeats at most everything, and whoever is first is never preempted
        for _ in range(10 + (len(self.clients) + 2) * work):
            if not self.scheduler.has_unfinished():
                break
            self.turn(lag)
        assert not self.scheduler.has_unfinished(), "work does not end"
        self.check()
        for client in self.clients:
            check_outcome(client)
        assert self.pool.num_free == self.pool.num_usable
        assert self.slots is None or self.slots.num_free == self.slots.num_usable

    # What the device does

    def _execute(self, row: Row, table: list[int], weights: int) -> None:
        client, size = self.by_request[row.request], self.pool.block_size
        cells = [(table[p // size], p % size) for p in range(row.start + row.count)]
        known = row.start + row.count - row.num_drafts
        wrong = {known + i for i in range(row.num_drafts) if not client.drafts[i]}
        del client.written[row.start :]
        for position in range(row.start, row.start + row.count):
            before = self.memory.get(cells[position - 1]) if position else 0
            guess = position in wrong
            self.memory[cells[position]] = client.cache_row(
                before or 0, position, weights, wrong=guess
            )
            last = client.written[-1] if client.written else 0
            client.written.append(client.cache_row(last, position, weights, wrong=guess))
        assert [self.memory.get(cell) for cell in cells] == client.written[: len(cells)], (
            f"{row.request.request_id} reads a history that is not its own"
        )
        if row.state:
            self._execute_state(row, row.state, client.written)

    def _execute_state(self, row: Row, state: StateSlots, written: list[int]) -> None:
        before = 0 if state.source is None else self.states.get(state.source)
        assert before == (written[row.start - 1] if row.start else 0), (
            f"{row.request.request_id} goes on from a state that is not its own"
        )
        assert len(state.drafts) == row.num_drafts
        first = row.start + row.count - row.num_drafts
        drafts = enumerate(state.drafts, first)
        for position, slot in [*state.snapshots, *drafts, (row.start + row.count, state.slot)]:
            self.states[slot] = written[position - 1]

    # What must hold

    def _check_step(self, step: Step) -> None:
        assert step.rows
        assert step.num_tokens == sum(row.count for row in step.rows)
        assert step.num_tokens <= self.config.max_num_batched_tokens
        assert len(step.rows) <= self.scheduler.num_running <= self.config.max_num_seqs
        assert len({row.request for row in step.rows}) == len(step.rows)
        kinds = [row.is_decode for row in step.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows first"
        assert sum(kinds) == step.num_decode_rows
        assert all((row.state is None) == (self.slots is None) for row in step.rows)
        states = [row.state for row in step.rows if row.state]
        written = Counter(slot for state in states for slot in slots_written(state))
        assert NULL_SLOT not in written
        assert not written or max(written.values()) == 1, "two rows write one slot"
        for state in states:
            if state.source != state.slot:
                assert state.source not in written, "a snapshot is rewritten while it is read"

    def _check_row(self, row: Row, num_tokens: int, num_computed: int, admissions: int) -> None:
        request, size, last = row.request, self.pool.block_size, row.start + row.count
        end, known = last - row.num_drafts, row.count - row.num_drafts
        client = self.by_request[request]
        assert request.state is RequestState.RUNNING
        assert known >= 1
        assert 0 <= row.num_drafts <= self.num_drafts
        assert num_tokens < request.token_limit, "nothing is scheduled beyond the limit"
        assert num_tokens + 1 + row.num_drafts <= request.token_limit
        assert end <= num_tokens
        assert row.samples == (end == num_tokens)
        assert row.is_decode == (row.start > 0 and known == 1 and row.samples)
        assert row.is_decode or not row.num_drafts
        assert request.num_computed == last
        assert request.num_tokens == num_tokens + row.samples
        if request.num_admissions == admissions:
            assert row.start == num_computed
        else:
            self._check_hit(row, client, num_tokens)
            client.most_positions = 0
        client.most_positions = max(client.most_positions, last)
        blocks = -(-client.most_positions // size)
        assert len(request.tables[0]) == blocks, "no block too few, none too many"
        if row.state:
            self._check_state(row, row.state)
        for block_id in request.tables[0][row.start // size :]:
            assert block_id != NULL_BLOCK
            assert self.pool.references(block_id) == 1, "a shared block would be written"
            assert self.pool.hash_of(block_id) is None, "a registered block would be written"

    def _check_state(self, row: Row, state: StateSlots) -> None:
        assert self.slots
        assert (state.source is None) == (row.start == 0), "from zeros, and only then"
        positions = [position for position, _ in state.snapshots]
        assert positions == sorted(set(positions))
        for position in positions:
            assert row.start < position <= row.start + row.count
            assert position % self.pool.block_size == 0
        for slot in slots_written(state):
            assert self.slots.references(slot) == 1, "a shared slot would be written"
            assert self.slots.hash_of(slot) is None, "a registered slot would be written"

    def _check_hit(self, row: Row, client: Client, num_tokens: int) -> None:
        request, size = row.request, self.pool.block_size
        assert len(client.tokens) == num_tokens, "admitted while a token is only promised"
        assert row.start % size == 0
        assert row.start < num_tokens
        assert row.start == 0 or (request.read_prefix_cache and self.pool.enable_prefix_caching)
        cells = [(request.tables[0][p // size], p % size) for p in range(row.start)]
        client.written = client.from_scratch(row.start, self.pool.generation)
        assert [self.memory.get(cell) for cell in cells] == client.written, "hit on other contents"
        if row.state and row.state.source is not None:
            assert self.states.get(row.state.source) == client.written[-1], "hit on another state"
        self.lost.discard(request)

    def _check_admissions(self, step: Step, before: dict[Request, tuple[int, int, int]]) -> None:
        """From the queue in strict order, and nobody in a step that threw somebody out."""
        new = [r.request for r in step.rows if r.request.num_admissions > before[r.request][2]]
        waiting = [r for r in self.by_request if r.state is RequestState.WAITING]
        assert not (new and step.preempted)
        if new and waiting:
            assert max(r.order for r in new) < min(r.order for r in waiting)

    def _note_lost(self) -> None:
        self.lost |= {r for r in self.by_request if r.state is RequestState.PREEMPTED}

    def check(self) -> None:
        self.pool.check()
        owned = Counter(block_id for r in self.by_request for block_id in blocks_of(r))
        for block_id in range(self.pool.num_blocks):
            assert self.pool.references(block_id) == owned[block_id], f"block {block_id}"
        in_flight = Counter(row.request for done in self.pending for row in done.step.rows)
        for client in self.clients:
            self._check_request(client, in_flight[client.request])
        for done in self.pending:
            for row, table in zip(done.step.rows, done.tables, strict=True):
                if row.request not in self.lost:
                    kept = blocks_of(row.request)[: len(table)]
                    assert kept == table, "blocks left while a step may write them"
        self._check_counters()
        if self.slots:
            self._check_slots(self.slots)

    def _check_slots(self, slots: SlotPool) -> None:
        slots.check()
        assert self.scheduler.states
        held = {r: self.scheduler.states.held(r) for r in self.by_request}
        owned = Counter(slot for r in self.by_request for slot in held[r])
        for slot in range(slots.num_slots):
            assert slots.references(slot) == owned[slot], f"slot {slot}"
            value = slots.hash_of(slot)
            if value is not None:
                right = from_scratch(self.prefixes[value], self.pool.generation)[-1]
                assert self.states.get(slot) == right, "a snapshot is not what its hash says"
        for request in self.by_request:
            assert bool(held[request]) == bool(request.tables)
        for done in self.pending:
            for row in done.step.rows:
                if row.request not in self.lost and row.state:
                    used = {*slots_written(row.state), row.state.source} - {None}
                    assert used <= set(held[row.request]), "slots left while a step may use them"

    def _check_request(self, client: Client, num_in_flight: int) -> None:
        request = client.request
        assert request.num_in_flight == num_in_flight
        table = blocks_of(request)
        assert len(set(table)) == len(table)
        assert request.num_generated == len(client.tokens) - len(client.prompt)
        assert (request.state is RequestState.ENDED) == bool(client.outcome)
        held = bool(request.tables)
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            assert request.num_computed == request.num_written == request.num_registered == 0
        match request.state:
            case RequestState.WAITING:
                assert not held
                assert not num_in_flight
            case RequestState.PREEMPTED:
                assert not held
                assert num_in_flight
            case RequestState.RUNNING:
                assert held
            case RequestState.ENDED:
                assert held == (num_in_flight > 0 and request not in self.lost)

    def _check_counters(self) -> None:
        counters, states = self.scheduler.counters, Counter(r.state for r in self.by_request)
        outcomes = Counter(client.outcome for client in self.clients)
        assert counters.num_added == len(self.clients)
        assert counters.num_aborted == outcomes["aborted"]
        assert counters.num_finished == outcomes["stop"] + outcomes["length"]
        assert counters.num_generated_tokens == self.num_delivered
        assert self.scheduler.num_waiting == states[RequestState.WAITING]
        assert self.scheduler.num_running == states[RequestState.RUNNING]
        assert self.pool.num_hit_tokens == sum(r.num_cached_tokens for r in self.by_request)


def blocks_of(request: Request) -> list[int]:
    return request.tables[0] if request.tables else []


def slots_written(state: StateSlots) -> list[int]:
    return [state.slot, *state.drafts, *(slot for _, slot in state.snapshots)]


def num_right(drafts: Sequence[bool]) -> int:
    """Those before the first wrong one."""
    return next((i for i, right in enumerate(drafts) if not right), len(drafts))


def check_outcome(client: Client) -> None:
    room = client.request.token_limit - len(client.prompt)
    assert room == client.request.num_generated or client.outcome != "length"
    assert client.outcome
    if client.outcome != "aborted":
        assert client.request.num_generated == min(room, client.ends_after)
    assert not client.request.tables


def shown(step: Step | None) -> list[str]:
    """Rows as text: `name[start:end] kind`, with a star where the row samples."""
    assert step is not None
    return [show_row(row) for row in step.rows]


def show_row(row: Row) -> str:
    kind = "decode" if row.is_decode else "prefill"
    span = f"{row.request.request_id}[{row.start}:{row.start + row.count}]"
    return f"{span} {kind}{'*' if row.samples else ''}"


def count_opcodes(call: Callable[[], object]) -> int:
    """Python instructions that a call executes: a clock without noise."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count
