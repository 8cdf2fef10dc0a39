"""A request as the scheduler sees it, and the queue where it waits: counts, blocks and hashes; no
token values, no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush

from trueline.cache.groups import Tables


class RequestState(Enum):
    NEW = "new"
    WAITING = "waiting"
    """In the queue; holds no blocks; every one of its tokens is known."""
    RUNNING = "running"
    """Has a seat and holds blocks."""
    PREEMPTED = "preempted"
    """Lost its blocks while steps are in flight; joins the queue when their tokens are known."""
    ENDED = "ended"
    """Finished or aborted. Holds blocks until its last step in flight is collected."""


@dataclass(slots=True, eq=False)
class Request:
    """The first fields are the caller's; the rest is written by the scheduler alone. The core adds
    token values in a subclass (live_request.py), which the scheduler never looks at."""

    request_id: str
    num_prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    """Lower runs earlier."""
    read_prefix_cache: bool = True
    """False where every position must be computed, as for prompt_logprobs."""
    block_hashes: list[bytes] = field(default_factory=list)
    """The chain of cache/prefix.py; the core extends it as token values become known."""

    num_drafts: int = field(default=0, init=False)
    """Drafts that its next row may carry; the core sets it before each step, the scheduler sets it
    back to 0."""

    state: RequestState = field(default=RequestState.NEW, init=False)
    id: int = field(default=-1, init=False)
    """Its place in the order of arrival. The executor knows it by this number: a `request_id` may
    come again while steps of its first life are still in flight."""
    order: tuple[int, int] = field(default=(0, 0), init=False)
    """Smaller goes first, everywhere; given once in `Scheduler.add` and never changed."""
    token_limit: int = field(default=0, init=False)
    """Prompt and generated tokens together never exceed it."""

    num_tokens: int = field(init=False)
    """Tokens known or promised: a token is promised by the dispatched step that samples it. Drafts
    do not count before they turn out right."""
    num_promised: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)
    """Tokens whose cache rows are written, or will be by steps already dispatched, drafts
    included."""
    num_written: int = field(default=0, init=False)
    """Tokens whose cache rows are written by collected steps."""
    num_registered: int = field(default=0, init=False)
    """Leading tokens whose blocks are registered in the prefix cache."""
    num_cached_tokens: int = field(default=0, init=False)
    """The prefix hit of the first admission, for reporting."""
    num_admissions: int = field(default=0, init=False)
    num_in_flight: int = field(default=0, init=False)
    """Steps dispatched and not collected that have a row of this request."""
    cache_generation: int = field(default=0, init=False)
    """The pool's generation at the last admission."""
    tables: Tables = field(default_factory=list, init=False)
    """Its blocks, by group; none where it holds none."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        """Generated tokens whose values are known."""
        return self.num_tokens - self.num_promised - self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """All tokens it may have are known or promised: nothing is left to schedule."""
        return self.num_tokens >= self.token_limit

    @property
    def gap(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 while drafts are in flight."""
        return 0 if self.is_complete else max(self.num_tokens - self.num_computed, 0)


class WaitingQueue:
    """A heap by `Request.order`. An aborted request stays inside until it surfaces, or until such
    leftovers are the majority: no operation scans the queue, counted over all of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    def push(self, request: Request) -> None:
        request.state = RequestState.WAITING
        heappush(self._heap, (request.order, request))

    def first(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if request.state is RequestState.WAITING:
                return request
            heappop(self._heap)
            self._num_stale -= 1
        return None

    def pop(self) -> Request:
        return heappop(self._heap)[1]

    def forget(self) -> None:
        """One request inside has just left the state WAITING."""
        self._num_stale += 1
        if self._num_stale > len(self):
            self._heap = [item for item in self._heap if item[1].state is RequestState.WAITING]
            heapify(self._heap)
            self._num_stale = 0
