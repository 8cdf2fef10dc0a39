"""What bounds the scheduler, and what it counts. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.errors import UsageError


class SchedulerError(RuntimeError):
    """The scheduler was driven wrongly: a bug of the engine, never the user's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    priority_aging_steps: int = 256
    num_draft_tokens: int = 0
    """That a decode row may carry."""
    snapshot_spacing: int | None = None
    """Tokens from one state snapshot of a prompt to the next, a multiple of the block size. None:
    only where prompts and answers end."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "priority_aging_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: it must be at least 1")
        # else decodes could use up the budget and keep a prefill waiting for as long as they last
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: a step has a token for every running request; "
                "raise the first or lower the second"
            )


@dataclass(slots=True)
class Counters:
    """Since the start. Added = finished + aborted + waiting + running + preempted."""

    num_steps: int = 0
    num_added: int = 0
    num_rejected: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
