"""Drafts: guesses at the next tokens of a request. Who makes them, and how many a row carries. The
engine computes drafts together with the token before them and accepts those that sampling gives as
well, so they change how long an answer takes, never the answer. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from trueline.cache.groups import BlockGroups
from trueline.engine.live_request import LiveRequest
from trueline.engine.request import Request


class Drafter(Protocol):
    @property
    def num_tokens(self) -> int:
        """The most that it proposes at a time."""

    def propose(self, request: LiveRequest) -> Sequence[int]:
        """What may follow `request.tokens`, all of which are known: ids of the model's vocabulary.
        What it raises breaks the core: whoever drafts answers for it."""


def place_drafts(
    counts: Mapping[Request, int], blocks: BlockGroups, budget: int
) -> dict[Request, int]:
    """How many drafts the row of each request carries. `counts`: the known tokens of each row, in
    scheduling order. Drafts get what is left of the budget and of the free blocks."""
    placed = {}
    for request, count in counts.items():
        wanted, request.num_drafts = request.num_drafts, 0
        placed[request] = 0
        if wanted and count == request.gap == 1 and request.num_computed:
            # each may bring a token, and so does the row without them
            most = min(wanted, budget, request.token_limit - request.num_tokens - 1)
            placed[request] = _find_blocks(request, blocks, most)
            budget -= placed[request]
    return placed


def _find_blocks(request: Request, blocks: BlockGroups, most: int) -> int:
    """As many drafts as there are free blocks for; nobody is preempted for a guess."""
    certain = request.num_computed + 1
    for drafts in range(most, 0, -1):
        if blocks.have(blocks.missing(request.tables, certain + drafts, certain)):
            blocks.allocate(request.tables, certain + drafts, certain)
            return drafts
    return 0
