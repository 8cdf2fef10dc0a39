"""Requests that want more blocks than there are, and blocks that others have had before."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.verify.engine import Ask
from trueline.verify.suite import forced
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.session import Session

SMALL_BLOCK = 32
"""Positions of a block up to which there is time for requests of several."""
MOST_CACHE_BYTES = 1_000_000_000
"""Of a cache whose last blocks are used."""


def under_pressure(session: Session, block: int) -> Iterator[Composition]:
    s = session
    size = session.plan.block_size
    # who is admitted has blocks for the next `block` tokens: answers go a block further
    prompt = max(size - 4, 12)
    further = -(-(prompt + block) // size) * size + 4
    total = min(max(further, prompt + 30), s.longest)
    whole, blocks = -(-total // size), -(-60 // size)
    yield Composition(
        name="preempt and resume",
        invariant="preempt = resume",
        what="more requests than the cache holds: some are preempted and computed again",
        asks=[Ask(s.tokens(prompt, i), total - prompt) for i in range(4)],
        changes={
            "num_gpu_blocks_override": 2 + 2 * whole + whole // 2,
            "max_num_batched_tokens": max(64, block),
            "max_model_len": max(64, block, total),
        },
        forced=forced.preempted,
    )
    # two that decode are admitted with 2 blocks each, and grow while a third's prompt goes on in
    # chunks so small that it does not end before they need its blocks
    third = 4 * size + 1
    if block == size == prompt + 4 and third + size <= s.longest:
        yield Composition(
            name="preempted within a prompt",
            invariant="preempt = resume",
            what="a prompt in chunks loses its blocks to requests that decode, and begins again",
            asks=[
                Ask(s.tokens(prompt, 5), 3 * size + 8),
                Ask(s.tokens(prompt, 6), 3 * size + 8),
                Ask(s.tokens(third, 7), 2, arrives=2),
            ],
            changes={
                "num_gpu_blocks_override": 10,
                "max_num_batched_tokens": 5,
                "max_num_seqs": 3,
                "max_model_len": max(64, third + size, prompt + 3 * size + 8),
            },
            forced=forced.preempted_within_a_prompt,
            tier="standard" if size <= SMALL_BLOCK else "full",
        )
    yield Composition(
        name="highest blocks",
        invariant="steady state",
        what="the last blocks of a cache of the size that the engine would have",
        asks=[Ask(s.tokens(40), 5), Ask(s.tokens(1, 1), 6, arrives=1), Ask(s.tokens(50, 2), 4)],
        changes={"num_gpu_blocks_override": _own_blocks(s)},
        highest=True,
        forced=forced.highest,
    )
    yield Composition(
        name="aborted requests",
        invariant="steady state",
        what="requests are aborted in prefill and decode; their blocks go to others at once",
        asks=[Ask(s.tokens(24, i), 8, arrives=i // 2) for i in range(10)],
        abort={1: 1, 2: 2, 4: 3, 5: 4, 7: 5},
        changes={"max_num_batched_tokens": 32},
        forced=lambda ran: "5 of 10 requests aborted",
    )
    yield Composition(
        name="cache turned over",
        invariant="steady state",
        what="a request after others have used every block and slot several times",
        asks=[Ask(s.tokens(33, 5), 5), Ask(s.tokens(9, 6), 5, arrives=1)],
        changes={"num_gpu_blocks_override": 2 + 4 * blocks, "max_model_len": max(64, block)},
        turned_over=True,
        forced=forced.turned_over,
    )


def _own_blocks(session: Session) -> int:
    """Of the first group, as far as there is room."""
    groups = session.plan.groups
    size = sum(group.num_blocks * group.block_bytes for group in groups)
    part = min(MOST_CACHE_BYTES / max(size, 1), 1.0)
    return max(int(groups[0].num_blocks * part), 64)
