"""The engine process's statistics: what the scheduler and the pools count, and step times."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.server.process.messages import STEP_BUCKETS, STEP_TOKEN_BUCKETS, Stats

if TYPE_CHECKING:
    from trueline.engine.core import EngineCore

SECONDS_BETWEEN = 0.05
"""From one snapshot to the next, at least."""


class StatsRecorder:
    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.num_prompt_tokens = self.num_corrupted = 0
        self.last_step_seconds = self.step_seconds = 0.0
        self.step_counts = [0] * (len(STEP_BUCKETS) + 1)
        self.step_token_counts = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
        self._num_steps = self._num_scheduled = 0
        self._sent = 0.0
        self._changed = False

    def added(self, requests: Iterable[CoreRequest]) -> None:
        self.num_prompt_tokens += sum(len(request.prompt_token_ids) for request in requests)

    def touched(self) -> None:
        """Something has been asked of the core."""
        self._changed = True

    def stepped(self, seconds: float, outputs: Iterable[CoreOutput]) -> None:
        self.last_step_seconds = seconds
        self.step_seconds += seconds
        self.step_counts[bisect_left(STEP_BUCKETS, seconds)] += 1
        self.num_corrupted += sum(
            output.finish_reason == "error" and not output.client_error for output in outputs
        )
        self._count_tokens()
        self._changed = True

    def _count_tokens(self) -> None:
        """Of the step that was dispatched, if one was."""
        counters = self.core.scheduler.counters
        steps, tokens = counters.num_steps, counters.num_scheduled_tokens
        if steps > self._num_steps:
            bucket = bisect_left(STEP_TOKEN_BUCKETS, tokens - self._num_scheduled)
            self.step_token_counts[bucket] += 1
        self._num_steps, self._num_scheduled = steps, tokens

    def due(self) -> Stats | None:
        """A snapshot where something has changed, and either SECONDS_BETWEEN have passed or the
        core is idle."""
        now = time.monotonic()
        idle = not self.core.has_unfinished()
        if not self._changed or not (idle or now - self._sent >= SECONDS_BETWEEN):
            return None
        self._sent, self._changed = now, False
        return self.snapshot()

    def snapshot(self) -> Stats:
        scheduler, slots = self.core.scheduler, self.core.slots
        # of several groups of state kinds, the one that runs out first
        pool = max(self.core.blocks.pools, key=lambda p: 1 - p.num_free / max(p.num_usable, 1))
        main = self.core.blocks.main  # which counts queries and hits
        counters, grammars = scheduler.counters, self.core.grammars
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_usable,
            num_blocks_used=pool.num_usable - pool.num_free,
            num_blocks_cached=pool.num_cached,
            num_slots=slots.num_usable if slots else 0,
            num_slots_used=slots.num_in_use if slots else 0,
            num_slots_cached=slots.num_cached if slots else 0,
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
            num_added=counters.num_added,
            num_finished=counters.num_finished,
            num_aborted=counters.num_aborted,
            num_rejected=counters.num_rejected,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_query_tokens=main.num_query_tokens,
            num_hit_tokens=main.num_hit_tokens,
            num_corrupted=self.num_corrupted,
            num_late_kernels=self.core.late_kernels.count,
            num_canary_checks=self.core.executor.num_canary_checks,
            last_step_seconds=self.last_step_seconds,
            step_seconds=self.step_seconds,
            step_counts=list(self.step_counts),
            step_token_counts=list(self.step_token_counts),
            num_grammars_compiled=grammars.num_compiled,
            num_grammar_hits=grammars.num_hits,
            grammar_seconds=grammars.compile_seconds,
        )
