"""What goes into the core and comes out of it, and what the core and its executor tell each other:
token ids and numbers, never text, never tensors. Plain structs, so that they can cross a process
boundary as they are."""

from __future__ import annotations

from typing import Final

import msgspec

from trueline.cache.slots import StateSlots
from trueline.engine.params import SamplingParams
from trueline.grammar.constraint import Constraint

UNKNOWN: Final = -1
"""Stands for a token that the step before samples; the runner puts it in."""


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None
    constraint: Constraint | None = None
    """What form the output has; the params' `structured_outputs` is made into it before."""


class TokenScore(msgspec.Struct, frozen=True):
    """A token, its logprob and rank in the raw distribution, and the likeliest ones there."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class CoreOutput(msgspec.Struct, kw_only=True):
    """What one request has got since the last output."""

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
    complete: bool = False
    """The constraint lets nothing follow: the last token is text as any other, no end token."""
    error: str | None = None
    client_error: bool = False
    """The error is what the request asks for: nothing has failed."""


# -- core and executor -----------------------------------------------------------------


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What sampling must know of a request: sent once, when the core accepts the request."""

    id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    bad_word_ids: list[list[int]]
    constrained: bool = False
    """The first rank's guide says which tokens it may draw (`Executor.constrain`)."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Positions [start, start + len(token_ids)) of a request."""

    id: int
    start: int
    token_ids: list[int]
    """The last may be UNKNOWN, where there are no drafts."""
    tables: list[list[int]]
    """Its block tables, by group."""
    is_decode: bool
    samples: bool
    """The logits of its last known token give the next one."""
    num_drafts: int = 0
    """Of its trailing tokens, those that are drafts. A decode row with k drafts samples after each
    of its 1 + k tokens."""
    num_scored: int = 0
    """Of its leading positions, those whose next prompt token's logprob was asked for."""
    state: StateSlots | None = None


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A step for every rank. Decode rows come first."""

    rows: list[StepRow]
    ended: list[int] = []
    """Requests that send no more rows: what is kept for them can go."""


class StepResult(msgspec.Struct, kw_only=True):
    """By row of the step."""

    sampled: dict[int, list[TokenScore]] = {}
    """The next tokens: with drafts, those up to the first that differs from its draft."""
    bad: list[int] = []
    """Rows that should have sampled (another token) but have NaN or infinite logits: never a random
    token."""
    complete: list[int] = []
    """Rows whose constraint lets nothing follow what they have drawn."""
    stuck: dict[int, str] = {}
    """Rows whose constraint cannot go on, through a fault of ours, and why."""
    unmet: dict[int, str] = {}
    """Rows that cannot go on by what their requests ask for, and why."""
    prompt_scores: dict[int, list[TokenScore]] = {}
    """Of the tokens after each of the row's scored positions."""


class Unowned(msgspec.Struct, frozen=True):
    """What no request owns: free blocks and unwritten cells of owned ones, by group, and free
    slots."""

    blocks: list[list[int]]
    cells: list[list[int]]
    slots: list[int]
