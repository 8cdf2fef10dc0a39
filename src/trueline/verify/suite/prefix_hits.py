"""Requests that begin with what the prefix cache has."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask
from trueline.verify.suite import forced
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.session import Session


def prefix_hits(session: Session, block: int) -> Iterator[Composition]:
    s = session
    spaced: JSON = {"snapshot_spacing": block} if s.plan.slots else {}
    head, other = s.tokens(2 * block, 7), s.tokens(2 * block, 8)
    if 3 * block + 16 > s.longest:
        return
    yield Composition(
        name="prefix hit",
        invariant="prefix = cold",
        what="prompts that begin with cached blocks, wholly and in part; equal blocks behind "
        "another beginning",
        asks=[
            Ask([*head, 1, 2, 3], 4),
            Ask(other, 4),
            Ask([*head, 4, 5], 6, arrives=8),
            Ask([*head[:block], *other[block:], 9], 3, arrives=8),
            Ask(head, 4, arrives=10),
        ],
        changes=spaced,
        forced=forced.hits,
        tier="smoke",
    )
    yield Composition(
        name="n samples of a prompt",
        invariant="prefix = cold",
        what="the same prompt four times at once, drawn with seeds",
        asks=[
            Ask([*head, 3], 5, arrives=i and 1, params={"temperature": 1.0, "seed": i})
            for i in range(4)
        ],
        forced=lambda ran: f"{len(ran.done.tokens)} requests of one prompt",
    )
    if s.plan.slots and 5 * block <= s.longest:
        yield _between_snapshots(s, block)
    yield Composition(
        name="prefix hit, one step ahead",
        invariant="overlapped = plain",
        what="a step of a request that began with cached blocks is scheduled before the first one "
        "that reads them has run; chunks behind them too",
        asks=[
            Ask([*head, 1, 2, 3], 4),
            Ask([*head, 4, 5], 6, arrives=12),
            Ask([*head, *s.tokens(20, 9)], 5, arrives=12),
        ],
        changes={**spaced, "overlap": True, "max_num_batched_tokens": max(block, 16)},
        forced=forced.hits,
    )


def _between_snapshots(s: Session, block: int) -> Composition:
    """As the engine keeps them by itself: at the ends of prompts and answers."""
    head = s.tokens(3 * block, 7)
    return Composition(
        name="prefix hit between snapshots",
        invariant="prefix = cold",
        what="prompts whose cached blocks reach further than the last state that was kept before",
        asks=[
            Ask([*head[:block], 1, 2, 3], 3),
            Ask([*head, 1, 2, 3], 3, arrives=6),
            Ask([*head[: 2 * block], 4, 5], 3, arrives=12),
            Ask([*head, 9, 9], 3, arrives=12),
        ],
        changes={"max_num_batched_tokens": max(4 * block, 64)},
        forced=forced.hits,
    )
