"""The engine's core: requests of token ids in, tokens out. It knows no text.

A step is dispatched, then collected. With `overlap` the loop runs one step ahead: step n + 1 is
scheduled and handed over while step n is still running. The same lines do both; only the lag
differs.

An exception in a step, wherever it comes from, ends the requests of that step with its words; the
others go on. Nothing that the step may have written gets a name, so nobody finds it. What the
scheduler has half done, and a GPU that is lost, no request can be blamed for: the core is broken
then, says so, and does nothing more. docs/engine.md has the rules.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from trueline.cache.blocks import BlockPool
from trueline.cache.pool import NULL, Pool
from trueline.cache.prefix import hash_blocks, prefix_salt
from trueline.cache.slots import SlotPool
from trueline.config import EngineConfig
from trueline.engine.batch import Batch, build_batch
from trueline.engine.failures import Failures
from trueline.engine.late_kernels import LateKernels
from trueline.engine.messages import CoreOutput, CoreRequest, TokenScore
from trueline.engine.request import Request
from trueline.engine.results import Pending, Result
from trueline.engine.runner import Runner
from trueline.engine.scheduler import Scheduler, SchedulerConfig
from trueline.engine.step import Row, Step
from trueline.errors import EngineBroken, RequestRejected, described
from trueline.plan.plan import Plan


@dataclass(slots=True)
class Sequence:
    """A request's tokens whose values are known, and the names of its full blocks. `key` names it
    inside: a request_id may come again while steps of its first life are still in flight."""

    key: str
    request: CoreRequest
    scheduled: Request
    tokens: list[int]
    salt: bytes
    hashes: list[bytes] = field(default_factory=list)
    num_scored: int = 0
    """Prompt positions whose logprobs have been told."""
    first_scheduled: float | None = None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Unowned:
    """What no request owns: free blocks, unused tails of others, free slots."""

    blocks: list[int]
    cells: list[int]
    slots: list[int]


class EngineCore:
    def __init__(
        self, runner: Runner, plan: Plan, config: EngineConfig, fingerprint: str = ""
    ) -> None:
        self.runner, self.plan, self.config = runner, plan, config
        self.fingerprint = fingerprint
        size = plan.layout.block_size
        self.pool = BlockPool(plan.num_blocks, size, config.enable_prefix_caching)
        self.slots = SlotPool(plan.state.num_slots) if plan.state else None
        limits = SchedulerConfig(
            plan.limits.max_num_batched_tokens,
            plan.limits.max_num_seqs,
            plan.max_model_len,
            snapshot_spacing=plan.state.spacing if plan.state else None,
        )
        self.scheduler = Scheduler(limits, self.pool, self.slots)
        self.sequences: dict[str, Sequence] = {}  # by key
        self.keys: dict[str, str] = {}  # request_id -> key, of those alive
        self.ended: list[str] = []  # keys, since the last dispatch
        self.outbox: list[CoreOutput] = []
        self.lag = 1 if plan.limits.overlap else 0
        self.late_kernels = LateKernels()
        self.in_flight: deque[tuple[Step, Future[Result] | Pending]] = deque()
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="trueline-runner")
        self.failures = Failures()
        self.broken: str | None = None
        """Why it cannot go on."""

    # -- requests ----------------------------------------------------------------------

    def add(self, request: CoreRequest) -> None:
        """Queue a request; RequestRejected if it can never run. After any error it is as if it had
        never come."""
        self._check_whole()
        name = request.request_id
        if name in self.keys:
            raise RequestRejected(f"request '{name}': this request_id is in use; choose another")
        params = request.params
        limit = self.plan.max_model_len - len(request.prompt_token_ids)
        key = f"{name}#{self.scheduler.counters.num_added}"
        scheduled = Request(
            key,
            len(request.prompt_token_ids),
            params.max_tokens if params.max_tokens is not None else max(limit, 1),
            request.priority,
            # every position must be computed where its logprobs are wanted
            read_prefix_cache=params.prompt_logprobs is None,
        )
        salt = prefix_salt(self.fingerprint, request.cache_salt)
        sequence = Sequence(key, request, scheduled, list(request.prompt_token_ids), salt)
        self._name_blocks(sequence)
        try:
            self.scheduler.add(scheduled)
        except RequestRejected as error:
            raise RequestRejected(str(error).replace(key, name)) from None
        self.sequences[key] = sequence
        self.keys[name] = key
        try:
            self.runner.admit(key, request, self._seed(request, scheduled.arrival))
        except BaseException:
            self.abort(name, tell=False)
            raise

    def abort(self, request_id: str, *, tell: bool = True) -> bool:
        """End a request at once; whatever is in flight for it is dropped. `tell` puts the end
        into the next step's news."""
        key = self.keys.get(request_id)
        if key is None or self.broken:
            return False
        self.scheduler.abort(key)
        self._forget(key)
        if tell:
            self.outbox.append(CoreOutput(request_id=request_id, finish_reason="abort"))
        return True

    def has_unfinished(self) -> bool:
        return not self.broken and bool(self.scheduler.has_unfinished() or self.outbox)

    def close(self) -> None:
        self.worker.shutdown(wait=True)

    def _seed(self, request: CoreRequest, arrival: int) -> int:
        """A request's own seed, or one drawn from the engine's and its arrival."""
        if request.params.seed is not None:
            return request.params.seed
        name = f"{self.config.seed}/{arrival}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")

    # -- the loop ----------------------------------------------------------------------

    def step(self) -> list[CoreOutput]:
        """Dispatch one step, and collect the one that is `lag` behind. Every call brings the work
        nearer to its end, or raises EngineBroken."""
        self._check_whole()
        try:
            self._step()
        except Exception as error:
            raise self._breaks(error) from error
        news, self.outbox = self.outbox, []
        return news

    def _step(self) -> None:
        idle = not self.in_flight
        ahead = self.lag if self._dispatch() else 0
        if idle and not self.in_flight and self.scheduler.has_unfinished():
            raise EngineBroken("requests are there, and nothing is scheduled")
        while len(self.in_flight) > ahead:
            self._collect()

    def _dispatch(self) -> bool:
        """Whether a step went out. One that failed on the way is in flight too: what goes before it
        is collected first."""
        with self._in_one_piece():
            step = self.scheduler.schedule()
        if step is None:
            return False
        try:
            self.in_flight.append((step, self._start(step)))
        except BaseException as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            self.in_flight.append((step, failed))
            if not isinstance(error, Exception):  # as Ctrl-C
                raise
            return False
        return True

    def _start(self, step: Step) -> Future[Result] | Pending:
        batch = self._batch(step)
        unowned = self._unowned() if self.config.poison else None
        if self.lag and not self.plan.device.is_gpu:
            # a GPU computes by itself what it was given; a CPU needs a thread for that
            return self.worker.submit(self._execute, batch, unowned)
        return self._launch(batch, unowned)

    def _execute(self, batch: Batch, unowned: Unowned | None) -> Result:
        return self._launch(batch, unowned).result()

    def _launch(self, batch: Batch, unowned: Unowned | None) -> Pending:
        """In the order of dispatch, so that a step before is done with what is poisoned now."""
        try:
            if unowned is not None:
                self.runner.caches.poison(unowned.blocks, unowned.cells, unowned.slots)
            return self.runner.launch(batch)
        except BaseException:
            self.runner.failed()
            raise

    def _batch(self, step: Step) -> Batch:
        rows = [self.sequences[row.request.request_id] for row in step.rows]
        now = time.monotonic()
        for sequence in rows:
            if sequence.first_scheduled is None:
                sequence.first_scheduled = now
        forget, self.ended = tuple(self.ended), []
        return build_batch(
            step,
            {s.key: s.tokens for s in rows},
            {
                s.key: len(s.request.prompt_token_ids)
                for s in rows
                if s.request.params.prompt_logprobs is not None
            },
            self.plan.layout,
            one_form=self.plan.batch_invariant,
            topk=self.plan.index.topk if self.plan.index else None,
            forget=forget,
        )

    def _collect(self) -> None:
        step, launched = self.in_flight[0]
        # what breaks off our waiting, as Ctrl-C, is not the step's: it stays in flight
        error = launched.exception() if isinstance(launched, Future) else None
        try:
            outputs = {} if error else self._read(step, launched.result())
        except Exception as found:
            error = found
        self.in_flight.popleft()
        if error is not None:
            self._fail(step, error)
            return
        self.failures.none()
        with self._in_one_piece():
            finished = [key for key, output in outputs.items() if output.finish_reason]
            for key in self.scheduler.collected(step, finished):
                outputs[key].finish_reason = "length"
                finished.append(key)
            for key in finished:
                self._forget(key)
        self.outbox += outputs.values()

    def _read(self, step: Step, result: Result) -> dict[str, CoreOutput]:
        """By key."""
        outputs: dict[str, CoreOutput] = {}
        for row in step.rows:
            sequence = self.sequences.get(row.request.request_id)
            if sequence is not None:  # else ended while this step ran: its results are dropped
                outputs[sequence.key] = self._news(row, sequence, result)
        return outputs

    def _fail(self, step: Step, error: BaseException) -> None:
        """Its requests end. Steps after it that are in flight have rows of theirs, which are
        dropped; what other rows there compute does not depend on this step."""
        alive = [key for row in step.rows if (key := row.request.request_id) in self.sequences]
        with self._in_one_piece():
            self.failures.add(error, len(alive))
            for row in step.rows:
                # also of requests that have ended: their blocks may be given a name until they go
                row.request.block_hashes = []
            for key in alive:
                name = self.sequences[key].request.request_id
                told = f"request '{name}': the step that computed it failed: {described(error)}"
                self.scheduler.abort(key)
                self._forget(key)
                self.outbox.append(CoreOutput(request_id=name, finish_reason="error", error=told))
            self.scheduler.collected(step)
            # the step may have been the one that was to tell the runner who has ended
            self.ended = [key for key in tuple(self.runner.stories) if key not in self.sequences]

    def _news(self, row: Row, sequence: Sequence, result: Result) -> CoreOutput:
        key, name = sequence.key, sequence.request.request_id
        output = CoreOutput(
            request_id=name,
            num_cached_tokens=sequence.scheduled.num_cached_tokens,
            first_scheduled=sequence.first_scheduled,
            prompt_scores=self._new_scores(sequence, result),
        )
        if not row.samples:
            return output
        if key in result.broken:
            output.finish_reason = "error"
            output.error = (
                f"request '{name}': at position {row.start + row.count - 1} the model's logits are "
                "NaN or infinite, or no token is left that may be taken; none was drawn"
            )
            self._unshare(sequence)
            return output
        score = result.samples[key]
        sequence.tokens.append(score.token_id)
        self._name_blocks(sequence)
        output.token_ids, output.scores = [score.token_id], [score]
        self._check_stop(sequence, score, output)
        return output

    @staticmethod
    def _new_scores(sequence: Sequence, result: Result) -> list[TokenScore]:
        """Each prompt position once, though a preempted prompt is computed again."""
        start, scores = result.prompt_scores.get(sequence.key, (0, []))
        fresh = scores[max(sequence.num_scored - start, 0) :]
        sequence.num_scored = max(sequence.num_scored, start + len(scores))
        return fresh

    @staticmethod
    def _check_stop(sequence: Sequence, score: TokenScore, output: CoreOutput) -> None:
        params, token = sequence.request.params, score.token_id
        if sequence.num_generated < params.min_tokens:
            return
        if token in (params.stop_token_ids or ()):
            output.finish_reason, output.stop_reason = "stop", token
        elif not params.ignore_eos and token in sequence.request.eos_token_ids:
            output.finish_reason = "stop"

    # -- the end of all ----------------------------------------------------------------

    def _check_whole(self) -> None:
        if self.broken:
            raise EngineBroken(self.broken)

    @contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """What is only half done here, be it by Ctrl-C, leaves nothing to go on from."""
        try:
            yield
        except BaseException as error:
            self._breaks(error)
            raise

    def _breaks(self, error: BaseException) -> EngineBroken:
        why = str(error) if isinstance(error, EngineBroken) else described(error)
        self.broken = self.broken or f"the engine cannot go on: {why}"
        return EngineBroken(self.broken)

    # -- housekeeping ------------------------------------------------------------------

    def _name_blocks(self, sequence: Sequence) -> None:
        if self.config.enable_prefix_caching:
            size = self.plan.layout.block_size
            sequence.hashes = hash_blocks(sequence.tokens, size, sequence.salt, sequence.hashes)
            sequence.scheduled.block_hashes = sequence.hashes

    def _unshare(self, sequence: Sequence) -> None:
        """What a broken request has computed is not to be found by others: neither what it would
        register now, nor what earlier chunks of its prompt have registered."""
        own = sequence.scheduled.num_cached_tokens // self.plan.layout.block_size
        for value in sequence.hashes[own:]:
            self.pool.forget(value)
        sequence.scheduled.block_hashes = []

    def _forget(self, key: str) -> None:
        sequence = self.sequences.pop(key)
        del self.keys[sequence.request.request_id]
        self.ended.append(key)

    def _unowned(self) -> Unowned:
        slots = _nobodys(self.slots) if self.slots else []
        return Unowned(_nobodys(self.pool), list(self._unwritten_cells()), slots)

    def _unwritten_cells(self) -> Iterator[int]:
        layout = self.plan.layout
        for sequence in self.sequences.values():
            request = sequence.scheduled
            held = len(request.block_ids) * layout.block_size
            yield from layout.cells(request.block_ids, request.num_computed, held)


def _nobodys(pool: Pool) -> list[int]:
    """The null one, and those that nobody holds and that nothing is known of."""
    return [NULL, *(i for i in pool.ids if not pool.references(i) and pool.hash_of(i) is None)]
