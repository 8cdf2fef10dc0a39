"""What goes into the core and comes out of it: token ids, never text. Plain structs, so that they
can cross a process boundary as they are."""

from __future__ import annotations

import msgspec

from trueline.engine.params import SamplingParams


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None


class TokenScore(msgspec.Struct, frozen=True):
    """A token, its logprob and rank in the raw distribution, and the likeliest ones there."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class CoreOutput(msgspec.Struct, kw_only=True):
    """News of one request since the last time."""

    request_id: str
    token_ids: list[int] = []
    scores: list[TokenScore] = []
    prompt_scores: list[TokenScore] = []
    num_cached_tokens: int = 0
    first_scheduled: float | None = None
    """When its first step went out, by time.monotonic(): a clock that processes share."""
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: int | str | None = None
    error: str | None = None
