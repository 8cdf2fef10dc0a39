"""The engine's core: requests of token ids in, tokens out. It knows no text.

A step is dispatched, then collected. With `overlap` the loop runs one step ahead: step n + 1 is
scheduled and handed over while step n is still running. The same lines do both; only the lag
differs.

An exception in a step, wherever it comes from, ends the requests of that step with its words; the
others go on. Nothing that the step may have written is registered in the prefix cache. After an
exception in the scheduler's bookkeeping, or on a GPU that is lost, the core is broken: it says so,
and does nothing more. docs/engine.md has the rules.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from trueline.cache.blocks import BlockPool
from trueline.cache.groups import BlockGroups
from trueline.cache.prefix import prefix_salt
from trueline.cache.slots import SlotPool
from trueline.config import EngineConfig
from trueline.engine.drafts import Drafter
from trueline.engine.executor import AnyExecutor, StepFailed
from trueline.engine.failures import Failures
from trueline.engine.grammars import Grammars, not_admitted
from trueline.engine.late_kernels import LateKernels
from trueline.engine.live_request import LiveRequest
from trueline.engine.messages import (
    Admission,
    CoreOutput,
    CoreRequest,
    StepMessage,
    StepResult,
)
from trueline.engine.no_token_left import check_allowed
from trueline.engine.params import request_seed
from trueline.engine.request import RequestState
from trueline.engine.scheduler import Scheduler
from trueline.engine.scheduler_config import SchedulerConfig
from trueline.engine.step import Row, Step
from trueline.engine.unowned import unowned
from trueline.errors import EngineBroken, RequestRejected, described
from trueline.grammar.constraint import Constraint
from trueline.grammar.guide import Guide
from trueline.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that is not collected yet."""

    step: Step
    message: StepMessage | None
    """None where the step failed before there was one."""
    launched: object
    """The executor's handle, or StepFailed."""


class EngineCore:
    def __init__(
        self,
        executor: AnyExecutor,
        plan: Plan,
        config: EngineConfig,
        fingerprint: str = "",
        drafter: Drafter | None = None,
    ) -> None:
        self.executor, self.plan, self.config = executor, plan, config
        self.fingerprint, self.drafter = fingerprint, drafter
        caching = config.enable_prefix_caching
        self.blocks = BlockGroups(
            [
                BlockPool(
                    g.num_blocks, g.block_size, caching, g.window, g.window_step, g.keeps_ends
                )
                for g in plan.groups
            ]
        )
        self.pool = self.blocks.main
        self.slots = SlotPool(plan.slots.num_slots) if plan.slots else None
        limits = SchedulerConfig(
            max_num_batched_tokens=plan.limits.max_num_batched_tokens,
            max_num_seqs=plan.limits.max_num_seqs,
            max_model_len=plan.max_model_len,
            num_draft_tokens=plan.limits.num_draft_tokens,
            snapshot_spacing=plan.slots.spacing if plan.slots else None,
        )
        self.scheduler = Scheduler(limits, self.blocks, self.slots)
        self.grammars = Grammars()
        """Set anew by who has the model's tokenizer."""
        self.num_arrived = 0
        self.requests: dict[str, LiveRequest] = {}
        """By request_id, those alive."""
        self.ended: dict[int, None] = {}
        """Ids of ended requests, until a step whose message named them is collected."""
        self.outputs: list[CoreOutput] = []
        """To be returned by the next step."""
        self.lag = 1 if plan.limits.overlap and drafter is None else 0
        """Steps that are launched before the one before them is collected. 0 with a drafter, which
        must know every token."""
        self.late_kernels = LateKernels()
        self.in_flight: deque[InFlight] = deque()
        self.failures = Failures()
        self.broken: str | None = None
        """Why it cannot go on."""

    # -- requests ----------------------------------------------------------------------

    def add(self, request: CoreRequest) -> int:
        """Queue a request; RequestRejected if it can never run. After any error it is as if it had
        never come. Returns its id in the executor, or -1: its grammars are compiled first."""
        self._check_not_broken()
        if request.request_id in self.requests:
            raise RequestRejected(
                f"request '{request.request_id}': this request_id is in use; choose another"
            )
        check_allowed(request)
        params = request.params
        limit = self.plan.max_model_len - len(request.prompt_token_ids)
        live = LiveRequest(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_new_tokens=params.max_tokens if params.max_tokens is not None else max(limit, 1),
            priority=request.priority,
            # every position must be computed where its logprobs are wanted
            read_prefix_cache=params.prompt_logprobs is None,
            message=request,
            tokens=list(request.prompt_token_ids),
            salt=prefix_salt(self.fingerprint, request.cache_salt),
            seed=request_seed(params, self.config.seed, self.num_arrived),
        )
        if request.constraint is None:
            self._admit(live)
        else:
            self._compile(live, request.constraint)
        self.num_arrived += 1
        return live.id

    def _compile(self, live: LiveRequest, constraint: Constraint) -> None:
        """It is admitted when its grammars are compiled."""
        if self.drafter is not None:
            raise RequestRejected("structured_outputs: not offered with drafts")
        self.scheduler.check(live)
        self.requests[live.request_id] = live
        self.grammars.start(live, constraint)
        if self.config.backend == "external_launcher":  # every rank schedules the same steps
            self._admit_compiled(wait_for_one=True)

    def _admit(self, live: LiveRequest, guide: Guide | None = None) -> None:
        self._hash_blocks(live)
        self.scheduler.add(live)
        self.requests[live.request_id] = live
        admission = Admission(
            id=live.id,
            request_id=live.request_id,
            prompt_token_ids=live.message.prompt_token_ids,
            params=live.message.params,
            seed=live.seed,
            eos_token_ids=live.message.eos_token_ids,
            bad_word_ids=live.message.bad_word_ids,
            constrained=guide is not None,
        )
        try:
            self.executor.admit(admission)
            if guide is not None:
                self.executor.constrain(live.id, guide)
        except BaseException:
            self.abort(live.request_id, report=False)
            raise

    def _admit_compiled(self, *, wait_for_one: bool = False) -> None:
        for live, made in self.grammars.ready(wait_for_one=wait_for_one):
            try:
                self._admit(live, made.result())
            except Exception as error:
                self.requests.pop(live.request_id, None)
                self.outputs.append(not_admitted(live.request_id, error))

    def abort(self, request_id: str, *, report: bool = True) -> bool:
        """End a request at once; whatever is in flight for it is dropped. `report` puts the end
        into the next step's outputs."""
        request = self.requests.get(request_id)
        if request is None or self.broken:
            return False
        self.grammars.drop(request_id)
        self.scheduler.abort(request_id)
        self._forget(request)
        if report:
            self.outputs.append(CoreOutput(request_id=request_id, finish_reason="abort"))
        return True

    def has_unfinished(self) -> bool:
        return not self.broken and bool(self.has_work() or len(self.grammars))

    def has_work(self) -> bool:
        """What `step` does without waiting for a grammar to be compiled."""
        waiting = self.scheduler.has_unfinished() or self.outputs or self.grammars.any_ready()
        return not self.broken and bool(waiting)

    def check(self) -> None:
        """Raises EngineBroken where the executor cannot go on, also while nothing runs."""
        self._check_not_broken()
        try:
            self.executor.check()
        except Exception as error:
            raise self._break(error) from error

    def close(self) -> None:
        """Raises EngineBroken where the canaries' last check finds something."""
        try:
            if not self.broken:
                self.executor.last_check()
        finally:
            self.grammars.close()
            self.executor.close()

    # -- the loop ----------------------------------------------------------------------

    def step(self) -> list[CoreOutput]:
        """Dispatch one step, and collect the one that is `lag` behind. Every call makes progress or
        raises EngineBroken: no loop around it spins."""
        self._check_not_broken()
        try:
            self._step()
        except Exception as error:
            raise self._break(error) from error
        outputs, self.outputs = self.outputs, []
        return outputs

    def _step(self) -> None:
        if len(self.grammars):
            self._admit_compiled(wait_for_one=not self.has_work())
        idle = not self.in_flight
        ahead = self.lag if self._dispatch() else 0
        if idle and not self.in_flight and self.scheduler.has_unfinished():
            raise EngineBroken("requests are there, and nothing is scheduled")
        while len(self.in_flight) > ahead:
            self._collect()

    def _dispatch(self) -> bool:
        """Whether a step was launched. One whose launch failed is in flight too: steps before it
        are collected first."""
        if self.drafter is not None:
            self._draft(self.drafter)
        with self._atomic():
            step = self.scheduler.schedule()
        if step is None:
            return False
        message = None
        try:
            message = self._message(step)
            if self.config.poison:
                self.executor.poison(unowned(step, self.requests.values(), self.blocks, self.slots))
            self.in_flight.append(InFlight(step, message, self.executor.launch(message)))
        except BaseException as error:
            self.in_flight.append(InFlight(step, message, StepFailed(error)))
            if not isinstance(error, Exception):  # as Ctrl-C
                raise
            return False
        return True

    def _draft(self, drafter: Drafter) -> None:
        most = self.plan.limits.num_draft_tokens
        for request in self.requests.values():
            decodes = request.gap == 1 and not request.num_promised
            if decodes and request.state is RequestState.RUNNING:
                request.drafts = drafter.propose(request)[:most]
                request.num_drafts = len(request.drafts)

    def _message(self, step: Step) -> StepMessage:
        now = time.monotonic()
        rows = []
        for row in step.rows:
            request = row.request
            assert isinstance(request, LiveRequest)
            if request.first_scheduled is None:
                request.first_scheduled = now
            rows.append(request.step_row(row))
        return StepMessage(rows=rows, ended=list(self.ended))

    def _collect(self) -> None:
        flight = self.in_flight[0]
        # what interrupts our waiting, as Ctrl-C, is not the step's: it stays in flight
        try:
            outcome = self._outcome(flight)
            outputs = {} if isinstance(outcome, StepFailed) else self._read(flight.step, outcome)
        except Exception as error:
            outcome = StepFailed(error)
        self.in_flight.popleft()
        if isinstance(outcome, StepFailed):
            self._fail(flight.step, outcome.error)
            return
        self.failures.none()
        with self._atomic():
            for ended in flight.message.ended if flight.message else ():
                self.ended.pop(ended, None)
            finished = [name for name, output in outputs.items() if output.finish_reason]
            accepted = self._accepted(flight.step, outputs)
            for name in self.scheduler.collected(flight.step, finished, accepted):
                outputs[name].finish_reason = "length"
                finished.append(name)
            for name in finished:
                self._forget(self.requests[name])
        self.outputs += outputs.values()

    def _outcome(self, flight: InFlight) -> StepResult | StepFailed:
        if isinstance(flight.launched, StepFailed):
            return flight.launched
        return self.executor.collect(flight.launched)

    def _read(self, step: Step, result: StepResult) -> dict[str, CoreOutput]:
        """By request_id. Requests that ended while the step ran get nothing of it."""
        return {
            request.request_id: self._output(i, row, request, result)
            for i, row in enumerate(step.rows)
            if (request := self._alive(row)) is not None
        }

    def _accepted(self, step: Step, outputs: Mapping[str, CoreOutput]) -> dict[int, int]:
        """By row, the drafts that were right."""
        return {
            i: max(len(outputs[row.request.request_id].token_ids) - 1, 0)
            for i, row in enumerate(step.rows)
            if row.num_drafts and row.request.request_id in outputs
        }

    def _alive(self, row: Row) -> LiveRequest | None:
        request = row.request
        assert isinstance(request, LiveRequest)
        return None if request.state is RequestState.ENDED else request

    def _fail(self, step: Step, error: BaseException) -> None:
        """Its requests end. Steps after it that are in flight have rows of theirs, which are
        dropped; what other rows there compute does not depend on this step."""
        alive = [request for row in step.rows if (request := self._alive(row)) is not None]
        with self._atomic():
            self.failures.add(error, len(alive))
            for row in step.rows:
                # also of requests that have ended: a later step of theirs would register blocks
                row.request.block_hashes = []
            for request in alive:
                name = request.request_id
                words = f"request '{name}': the step that computed it failed: {described(error)}"
                self.scheduler.abort(name)
                self._forget(request)
                self.outputs.append(CoreOutput(request_id=name, finish_reason="error", error=words))
            self.scheduler.collected(step)

    def _output(self, i: int, row: Row, request: LiveRequest, result: StepResult) -> CoreOutput:
        output = request.output(i, row, result)
        self._hash_blocks(request)
        if output.finish_reason == "error":
            self._unshare(request)
        return output

    # -- a core that cannot go on -------------------------------------------------------

    def _check_not_broken(self) -> None:
        if self.broken:
            raise EngineBroken(self.broken)

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        """Bookkeeping that is interrupted half way, be it by Ctrl-C, is inconsistent: the core is
        broken then."""
        try:
            yield
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> EngineBroken:
        why = str(error) if isinstance(error, EngineBroken) else described(error)
        self.broken = self.broken or f"the engine cannot go on: {why}"
        return EngineBroken(self.broken)

    # -- housekeeping ------------------------------------------------------------------

    def _hash_blocks(self, request: LiveRequest) -> None:
        if self.config.enable_prefix_caching:
            request.hash_blocks(self.blocks.hash_size)

    def _unshare(self, request: LiveRequest) -> None:
        """What a broken request has computed is not to be found by others: neither what it would
        register now, nor what earlier chunks of its prompt have registered."""
        own = request.num_cached_tokens // self.blocks.hash_size
        for value in request.block_hashes[own:]:
            for pool in self.blocks.pools:
                pool.forget(value)
        request.block_hashes = []

    def _forget(self, request: LiveRequest) -> None:
        del self.requests[request.request_id]
        if request.id >= 0:  # else its grammars were not compiled yet
            self.ended[request.id] = None
