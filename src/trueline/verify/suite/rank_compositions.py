"""Requests whose layers several ranks share, as threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.session import Session

MOST_BLOCK = 64
"""Positions of a block up to which there are requests that begin with cached ones."""


def on_ranks(session: Session, block: int) -> Iterator[Composition]:
    """Unless every composition runs on the user's own ranks."""
    s = session
    if s.in_processes:
        return
    for size, whole in ((2, False), (2, True), (4, False), (4, True), (8, False)):
        experts = "experts whole" if whole else "experts by width"
        yield Composition(
            name=f"{size} ranks, {experts}",
            invariant="ranks = one",
            what=f"the model divided among {size} ranks, which exchange sums: words at the edges "
            "of each one's vocabulary, draws, cached prefixes, requests that come and go",
            asks=[
                Ask([*_edges(s.spec.vocab.total, size), *s.tokens(20)], 5),
                Ask(s.tokens(7, 1), 3, arrives=1),
                Ask(s.tokens(9, 2), 6, arrives=2, params={"temperature": 1.0, "seed": 5}),
                Ask(s.tokens(5, 3), 4, arrives=5, params={"temperature": 1.0}),
                *_with_one_beginning(s, block),
            ],
            changes=_spaced(s, block),
            ranks=size,
            expert_parallel=whole,
            tier="standard" if (size, whole) in ((2, False), (2, True), (4, False)) else "full",
            forced=lambda ran, size=size: f"{size} ranks as threads",  # type: ignore[misc]
        )
    for whole in (False, True):
        experts = "experts whole" if whole else "experts by width"
        yield Composition(
            name=f"the bits of one rank, {experts}",
            invariant="ranks = one",
            what="batch-invariant mode: two ranks have the bits of one",
            asks=[
                Ask([*_edges(s.spec.vocab.total, 2), *s.tokens(12)], 5),
                Ask(s.tokens(9, 2), 4, arrives=1),
            ],
            changes={"batch_invariant": True},
            ranks=2,
            expert_parallel=whole,
            same_on_one=True,
            forced=lambda ran: "2 ranks as threads, batch_invariant=True",
        )


def _edges(words: int, ranks: int) -> list[int]:
    """The first and the last word of each rank's part of the vocabulary."""
    starts = [words * rank // ranks for rank in range(ranks)]
    return [word % words for start in starts for word in (start, start - 1)]


def _with_one_beginning(session: Session, block: int) -> list[Ask]:
    if block > MOST_BLOCK or 3 * block + 16 > session.longest:
        return []
    head = session.tokens(2 * block, 7)
    return [Ask([*head, 1, 2, 3], 3, arrives=3), Ask([*head, 4], 4, arrives=9)]


def _spaced(session: Session, block: int) -> JSON:
    return {"snapshot_spacing": block} if session.plan.slots else {}
