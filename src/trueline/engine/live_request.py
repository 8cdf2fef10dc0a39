"""A request in the core: the counts and blocks that the scheduler keeps of it, and its token
values, which the scheduler never sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trueline.cache.prefix import hash_blocks
from trueline.engine.messages import (
    UNKNOWN,
    CoreOutput,
    CoreRequest,
    StepResult,
    StepRow,
    TokenScore,
)
from trueline.engine.request import Request
from trueline.engine.step import Row


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest(Request):
    message: CoreRequest
    tokens: list[int]
    """Those whose values are known."""
    salt: bytes
    seed: int
    drafts: Sequence[int] = field(default=(), init=False)
    """Guesses at its next tokens; its next row carries as many of the first ones as the scheduler
    finds room for."""
    num_scored: int = field(default=0, init=False)
    """Prompt positions whose logprobs have been reported."""
    first_scheduled: float | None = field(default=None, init=False)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def hash_blocks(self, hash_size: int) -> None:
        """Of all blocks whose tokens are known by now."""
        if len(self.tokens) // hash_size == len(self.block_hashes):
            return  # a step in most cases: the chain is as long as the context
        self.block_hashes = hash_blocks(self.tokens, hash_size, self.salt, self.block_hashes)

    def step_row(self, row: Row) -> StepRow:
        """With copies of what the scheduler may change afterwards."""
        known = row.count - row.num_drafts
        tokens = self.tokens[row.start : row.start + known]
        if len(tokens) < known:
            tokens.append(UNKNOWN)
        return StepRow(
            id=self.id,
            start=row.start,
            token_ids=[*tokens, *self.drafts[: row.num_drafts]],
            num_drafts=row.num_drafts,
            tables=[list(table) for table in self.tables],
            is_decode=row.is_decode,
            samples=row.samples,
            num_scored=self._num_scored(row),
            state=row.state,
        )

    def _num_scored(self, row: Row) -> int:
        """All positions of the row that have a next prompt token, if their logprobs were asked
        for."""
        if self.message.params.prompt_logprobs is None:
            return 0
        return max(min(row.count, self.num_prompt_tokens - 1 - row.start), 0)

    def new_scores(self, start: int, scores: list[TokenScore]) -> list[TokenScore]:
        """Each prompt position once, though a preempted prompt is computed again."""
        fresh = scores[max(self.num_scored - start, 0) :]
        self.num_scored = max(self.num_scored, start + len(scores))
        return fresh

    def output(self, i: int, row: Row, result: StepResult) -> CoreOutput:
        """What this row, the step's i-th, has brought."""
        output = CoreOutput(
            request_id=self.request_id,
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled=self.first_scheduled,
            prompt_scores=self.new_scores(row.start, result.prompt_scores.get(i, [])),
        )
        if not row.samples:
            return output
        for score in result.sampled.get(i, ()):
            self.tokens.append(score.token_id)
            output.token_ids.append(score.token_id)
            output.scores.append(score)
            self.check_stop(score.token_id, output)
            if output.finish_reason:
                return output  # what was drafted beyond the end is dropped
        if i in result.complete:
            output.finish_reason, output.complete = "stop", True
        elif i in result.stuck:
            output.finish_reason = "error"
            output.error = f"request '{self.request_id}': its grammar: {result.stuck[i]}"
        elif i in result.unmet:
            output.finish_reason, output.client_error = "error", True
            where = f"after {self.num_outputs} tokens"
            output.error = f"request '{self.request_id}': {where}: {result.unmet[i]}"
        elif i in result.bad:
            output.finish_reason = "error"
            output.error = (
                f"request '{self.request_id}': at position {len(self.tokens) - 1} the model's "
                "logits are NaN or infinite; none was drawn"
            )
        return output

    def check_stop(self, token: int, output: CoreOutput) -> None:
        params = self.message.params
        if self.num_outputs < params.min_tokens:
            return
        if token in (params.stop_token_ids or ()):
            output.finish_reason, output.stop_reason = "stop", token
        elif not params.ignore_eos and token in self.message.eos_token_ids:
            output.finish_reason = "stop"
