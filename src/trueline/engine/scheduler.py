"""Which tokens of which requests the next step computes. No torch, no clock, no token values.

No phases: a request has tokens known and tokens computed, and a step hands out a token budget to
close the gap. Chunked prefill, mixed steps, prefix hits and preemption fall out of that.

**Order.** One total order decides who goes first, for the queue, the budget, blocks and
preemption: `priority * priority_aging_steps + the step of arrival`, then arrival. It is given once
and never changes, yet it is aging: a request overtakes those that are one priority level better
but arrive `priority_aging_steps` steps later. So nobody is overtaken for ever, no queue is
ever sorted again, and whoever is first can be held up by nobody.

**Budget.** Every running request that needs one token gets it; the rest goes to the others in
order, then to new ones. The queue is strict: what does not fit blocks those behind it.

**Running ahead.** A row that reaches the last token promises the next one at once, so step n+1 can
be scheduled before step n is collected. Steps execute in the order they were scheduled and must
be collected in that order.

**Drafts.** A decode row may carry guesses at the tokens after its own, which are computed with it.
They take what is left of the budget and of the free blocks when everybody else has got theirs, so
they hold up nobody. How many were right is known when the step is collected; the rest is rolled
back, and until then the request is not scheduled ahead.

**Blocks** are allocated chunk by chunk, in every group of state kinds (cache/groups.py). A waiting
request is admitted when the free blocks would let it and all running requests compute their known
tokens and a block more each (up to their limits): with less, one of them would soon be preempted.
When no request runs, blocks for its first chunk suffice.
A running request that finds no blocks preempts the last in order; it waits if it is the last
itself, or if a step in flight is about to give blocks back. A request in the queue preempts nobody.
A preempted request starts again from what the prefix cache still has. Its blocks are free at
once, since later steps execute later; those of an ended request after its last step is collected.

**Slots.** Where the model keeps a state per sequence, a seat takes a slot as well: without a free
one the queue waits. Nobody is preempted for a slot. engine/states.py has the rest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping

from trueline.cache.groups import BlockGroups, Prefix, Tables
from trueline.cache.slots import SlotPool
from trueline.engine.drafts import place_drafts
from trueline.engine.request import Request, RequestState, WaitingQueue
from trueline.engine.scheduler_config import Counters, SchedulerConfig, SchedulerError
from trueline.engine.states import States
from trueline.engine.step import Row, Step
from trueline.errors import RequestRejected


class Scheduler:
    def __init__(
        self, config: SchedulerConfig, blocks: BlockGroups, slots: SlotPool | None = None
    ) -> None:
        """`slots` for models whose mixers keep a state per sequence."""
        self.config, self.blocks = config, blocks
        self.states = (
            States(blocks, slots, config.snapshot_spacing, config.num_draft_tokens)
            if slots
            else None
        )
        self.counters = Counters()
        self._live: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # sorted by order
        self._in_flight: deque[Step] = deque()
        self._draining: set[Request] = set()  # ended, with blocks that steps in flight may write
        self._preempted: list[str] = []  # since the last step

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        """A request is alive, or a step is not collected."""
        return bool(self._live or self._in_flight)

    # Requests come and go

    def add(self, request: Request) -> None:
        self.check(request)
        request.id = self.counters.num_added
        aged = request.priority * self.config.priority_aging_steps + self.counters.num_steps
        request.order = (aged, request.id)
        self.counters.num_added += 1
        self._live[request.request_id] = request
        self._waiting.push(request)

    def check(self, request: Request) -> None:
        """RequestRejected where it could never finish."""
        if request.state is not RequestState.NEW:
            raise SchedulerError(f"request '{request.request_id}' was added before")
        wanted = request.num_prompt_tokens + request.max_new_tokens
        request.token_limit = min(wanted, self.config.max_model_len)
        if problem := self._why_impossible(request):
            self.counters.num_rejected += 1
            raise RequestRejected(f"request '{request.request_id}': {problem}")

    def _why_impossible(self, request: Request) -> str | None:
        prompt, limit = request.num_prompt_tokens, self.config.max_model_len
        if request.request_id in self._live:
            return "this request_id is in use; choose another"
        if prompt < 1 or request.max_new_tokens < 1:
            return (
                f"{prompt} prompt tokens and max_new_tokens={request.max_new_tokens}; "
                "both must be at least 1"
            )
        if prompt >= limit:
            return (
                f"the prompt has {prompt} tokens, max_model_len={limit} leaves room for "
                f"{limit - 1} and one new token; shorten the prompt or raise max_model_len"
            )
        most = self.blocks.most_held(request.token_limit - 1, self.config.max_num_batched_tokens)
        for pool, needed in zip(self.blocks.pools, most, strict=True):
            if needed > pool.num_usable:
                return (
                    f"{prompt} prompt tokens and up to {request.token_limit - prompt} new ones "
                    f"need {needed} cache blocks of {pool.block_size}, the pool has "
                    f"{pool.num_usable}; lower max_new_tokens, shorten the prompt, or give the "
                    "cache more memory"
                )
        return None

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if it is not here. What its steps in flight still bring
        is to be dropped."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._end(request)
        self.counters.num_aborted += 1
        return True

    def _end(self, request: Request) -> None:
        del self._live[request.request_id]
        state, request.state = request.state, RequestState.ENDED
        if state is RequestState.RUNNING:
            del self._running[bisect_left(self._running, request.order, key=_order)]
        elif state is RequestState.WAITING:
            self._waiting.forget()
        if request.num_in_flight == 0:
            self._give_back(request)
        elif request.tables:
            self._draining.add(request)

    def _give_back(self, request: Request) -> None:
        self._draining.discard(request)
        if request.tables:
            self.blocks.release(request.tables)
            request.tables = []
        if self.states:
            self.states.give_back(request)

    # A step goes out

    def schedule(self) -> Step | None:
        """The next step; None if nothing can run before a step in flight is collected (or nothing
        is there to run)."""
        counts = self._share_budget()
        if self._find_blocks(counts):
            self._admit(counts)
        if not counts:
            return None
        budget = self.config.max_num_batched_tokens - sum(counts.values())
        drafts = place_drafts(counts, self.blocks, budget)
        rows = [
            self._dispatch(request, count, drafts[request]) for request, count in counts.items()
        ]
        decode = [row for row in rows if row.is_decode]
        prefill = [row for row in rows if not row.is_decode]
        num_tokens = sum(row.count for row in rows)
        step = Step((*decode, *prefill), len(decode), num_tokens, tuple(self._preempted))
        self._preempted.clear()
        self._in_flight.append(step)
        self.counters.num_steps += 1
        self.counters.num_scheduled_tokens += num_tokens
        return step

    def _share_budget(self) -> dict[Request, int]:
        """Tokens for each running request, in scheduling order."""
        gaps = {request: gap for request in self._running if (gap := request.gap)}
        counts = {request: 1 for request, gap in gaps.items() if gap == 1}
        budget = self.config.max_num_batched_tokens - len(counts)
        for request, gap in gaps.items():
            if gap > 1 and budget:
                counts[request] = min(gap, budget)
                budget -= counts[request]
        return counts

    def _find_blocks(self, counts: dict[Request, int]) -> bool:
        """Give each request its blocks, in order; drop from `counts` those that get none. True if
        all of them got theirs and nobody was preempted: only then may waiting ones be admitted."""
        before = self.counters.num_preemptions
        short = False
        for request in list(self._running):
            if request not in counts:
                continue
            end = request.num_computed + counts[request]
            missing = self.blocks.missing(request.tables, end)
            # once one waits for blocks, nobody after it takes any
            if any(missing) and (short or not self._make_room(request, missing, counts)):
                short = True
                del counts[request]
            else:
                self.blocks.allocate(request.tables, end)
        return not short and self.counters.num_preemptions == before

    def _make_room(self, request: Request, missing: list[int], counts: dict[Request, int]) -> bool:
        while not self.blocks.have(missing):
            last = self._running[-1]
            if last is request or self._blocks_are_coming():
                return False
            self._preempt(last)
            counts.pop(last, None)
        return True

    def _blocks_are_coming(self) -> bool:
        """A step in flight gives blocks back when collected: waiting for it is cheaper than
        preempting a request, all of whose tokens are then computed again."""
        return bool(self._draining) or any(request.is_complete for request in self._running)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._give_back(request)
        request.num_computed = request.num_written = request.num_registered = 0
        self.counters.num_preemptions += 1
        self._preempted.append(request.request_id)
        if request.num_in_flight:
            request.state = RequestState.PREEMPTED
        else:
            self._waiting.push(request)

    def _admit(self, counts: dict[Request, int]) -> None:
        """Seat requests from the queue while budget, seats, slots and blocks last."""
        budget = self.config.max_num_batched_tokens - sum(counts.values())
        seats = self.config.max_num_seqs - len(self._running)
        if not budget or not seats or not len(self._waiting):
            return
        reserve = self._sums(self._blocks_ahead(request) for request in self._running)
        while budget and seats and (request := self._waiting.first()):
            if self.states and not self.states.has_room():
                return
            prefix = self._cached_prefix(request)
            count = min(request.num_tokens - prefix.num_tokens, budget)
            end = prefix.num_tokens + count
            needed = self.blocks.missing(prefix.tables, end)
            if self._running:
                soon = self._ahead(prefix.tables, request, prefix.num_tokens)
                needed = self._sums([soon, reserve])
            if not self.blocks.have(needed, sharing=prefix.tables):
                return
            self._seat(self._waiting.pop(), prefix, end)
            counts[request] = count
            budget -= count
            seats -= 1
            reserve = self._sums([reserve, self._blocks_ahead(request)])

    def _sums(self, counts: Iterable[list[int]]) -> list[int]:
        """By group."""
        return [sum(each) for each in zip([0] * len(self.blocks.pools), *counts, strict=True)]

    def _cached_prefix(self, request: Request) -> Prefix:
        """Whole blocks, and never all tokens: without one to compute there are no logits. So the
        first token computed starts a fresh block, and shared blocks are never written."""
        if not request.read_prefix_cache:
            return Prefix(0, self.blocks.empty())
        most = request.num_tokens - 1
        prefix = self.blocks.lookup(request.block_hashes, most)
        while self.states and prefix.num_tokens:
            usable = self.states.usable(request, prefix.num_tokens)
            if usable == prefix.num_tokens:
                break
            prefix = self.blocks.lookup(request.block_hashes, usable)
        return prefix

    def _seat(self, request: Request, prefix: Prefix, end: int) -> None:
        """With blocks for the positions up to `end`."""
        self.blocks.share(prefix.tables)  # first, or allocating could evict them
        request.tables = prefix.tables
        self.blocks.allocate(request.tables, end)
        request.num_registered = request.num_computed = request.num_written = prefix.num_tokens
        request.cache_generation = self.blocks.main.generation
        if self.states:
            self.states.seat(request)
        request.num_admissions += 1
        # only the first time: a preempted request finds itself, which tells nothing about traffic
        if request.num_admissions == 1:
            request.num_cached_tokens = request.num_computed
            if request.read_prefix_cache:
                self.blocks.main.count_query(request.num_tokens, request.num_computed)
        request.state = RequestState.RUNNING
        insort(self._running, request, key=_order)

    def _dispatch(self, request: Request, known: int, drafts: int) -> Row:
        start, count = request.num_computed, known + drafts
        samples = start + known == request.num_tokens
        state = (
            self.states.row_state(request, start, start + count, drafts) if self.states else None
        )
        request.num_computed += count
        request.num_in_flight += 1
        if samples:
            request.num_tokens += 1
            request.num_promised += 1
        return Row(
            request=request,
            start=start,
            count=count,
            is_decode=samples and known == 1 and start > 0,
            samples=samples,
            num_drafts=drafts,
            state=state,
        )

    def _horizon(self, request: Request) -> int:
        """Positions it will write before long. The last token of all is never written."""
        return min(request.num_tokens + self.blocks.lcm_block_size, request.token_limit - 1)

    def _blocks_ahead(self, request: Request) -> list[int]:
        return self._ahead(request.tables, request, request.num_computed)

    def _ahead(self, tables: Tables, request: Request, computed: int) -> list[int]:
        """Behind a window: what is known comes in chunks, the rest token by token."""
        known = max(request.num_tokens - computed, 1 + self.config.num_draft_tokens)
        chunk = min(known, self.config.max_num_batched_tokens)
        return self.blocks.ahead(tables, self._horizon(request), chunk)

    # Its results come back

    def collected(
        self,
        step: Step,
        finished: Iterable[str] = (),
        accepted: Mapping[int, int] | None = None,
    ) -> tuple[str, ...]:
        """The results of the oldest step in flight are known, and the requests of `finished` end
        with it (those that have ended already are passed over). `accepted`: by row, how many of its
        drafts were right; none where it is not named. Returns the ids that end because they have
        all the tokens they may have. Extend `block_hashes` before the call."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise SchedulerError("steps are collected once each, in the order of scheduling")
        names = set(finished)
        strangers = names.difference(row.request.request_id for row in step.rows)
        if strangers:
            raise SchedulerError(f"finished, but not in the step: {sorted(strangers)}")
        self._in_flight.popleft()
        full = []
        for i, row in enumerate(step.rows):
            request = row.request
            self._settle(row, (accepted or {}).get(i, 0))
            has_all = request.is_complete and not request.num_promised
            if request.state is not RequestState.ENDED and (request.request_id in names or has_all):
                self._end(request)
                self.counters.num_finished += 1
                if request.request_id not in names:
                    full.append(request.request_id)
            if request.num_in_flight == 0 and request.state is RequestState.PREEMPTED:
                self._waiting.push(request)
        return tuple(full)

    def _settle(self, row: Row, accepted: int) -> None:
        """The row is computed: its cache rows are written and its promise is kept. What it computed
        of drafts that were wrong counts for nothing."""
        if not 0 <= accepted <= row.num_drafts:
            raise SchedulerError(f"{accepted} of {row.num_drafts} drafts cannot be right")
        request, rejected = row.request, row.num_drafts - accepted
        ended = request.state is RequestState.ENDED
        request.num_in_flight -= 1
        if row.samples:
            request.num_promised -= 1
            if ended:
                request.num_tokens -= 1  # a token after the end is dropped
            else:
                request.num_tokens += accepted
                self.counters.num_generated_tokens += 1 + accepted
        if request.tables:  # else it was preempted, and this row's blocks are gone
            request.num_computed -= rejected
            request.num_written = row.start + row.count - rejected
            self._register(request)
            if self.states:
                self.states.settle(row, accepted)
            self.blocks.trim(request.tables, row.start, request.num_written)
        if ended and request.num_in_flight == 0:
            self._give_back(request)

    def _register(self, request: Request) -> None:
        if request.cache_generation == self.blocks.main.generation:
            request.num_registered = self.blocks.register(
                request.tables, request.block_hashes, request.num_registered, request.num_written
            )


def _order(request: Request) -> tuple[int, int]:
    return request.order
