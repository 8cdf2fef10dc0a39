"""The contract of rotation: a new tensor, arguments as they were, whatever the implementation does
inside. So no caller can come to rely on one that writes in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.ops.registry import implementation, runnable
from trueline.ops.rope import Rope, reference
from trueline.spec.rope import Pairing
from trueline.verify.bounds import rounding
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.verify.ops.data import randn

TOKENS, HEADS, WIDTH, ROTATED = 9, 5, 26, 14
PAIRINGS: tuple[Pairing, ...] = ("interleaved", "half-split")
GATE = rounding(6)
"""Of a number, relative to the largest: that of a pair may be √2 times smaller than both."""


def buffers() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(how, memory, q [n, heads, width], k [n, 1, width]): alone, side by side in one buffer, one
    inside the other, and overlapping by half."""
    q, k = randn(TOKENS, HEADS, WIDTH), randn(TOKENS, 1, WIDTH, seed=1)
    yield "q alone", q, q, k
    yield "k alone", k, q, k
    both = randn(TOKENS, HEADS + 1, WIDTH, seed=2)
    yield "one buffer", both, both[:, :HEADS], both[:, HEADS:]
    yield "k is a head of q", both, both, both[:, 2:3]
    flat = randn(TOKENS * HEADS * WIDTH + 3 * WIDTH, seed=3)
    strides = (HEADS * WIDTH, WIDTH, 1)
    q = flat.as_strided((TOKENS, HEADS, WIDTH), strides)
    yield "overlapping", flat, q, flat.as_strided((TOKENS, 1, WIDTH), strides, WIDTH // 2)
    transposed = randn(WIDTH, TOKENS, HEADS + 1, seed=4)
    across = transposed.permute(1, 2, 0)
    yield "not contiguous", transposed, across[:, :HEADS], across[:, HEADS:]


def angles() -> tuple[Tensor, Tensor]:
    made = 50 * randn(TOKENS, ROTATED // 2, seed=5)
    return 1.2 * made.cos(), 1.2 * made.sin()


def rope_contract(subject: Subject) -> None:
    for name in runnable("rope", torch.float32):
        keeps_its_arguments(implementation("rope", name))


def keeps_its_arguments(op: Rope) -> None:
    """On the first channels of q and of k, as an indexer uses it."""
    cos, sin = angles()
    for pairing in PAIRINGS:
        for how, memory, q, k in buffers():
            what = f"rope, {pairing}, {how}"
            for order in ((q, k), (k, q)):
                given = [x[..., :ROTATED] for x in order]
                before = [x.clone() for x in (memory, cos, sin)]
                exact = [reference.run(x.double(), cos, sin, pairing) for x in given]
                made = [op.run(x, cos, sin, pairing) for x in given]
                after = (memory, cos, sin)
                if not all(map(torch.equal, before, after)):
                    raise CheckFailed(f"rope contract: {what}: an argument was written")
                for ours, wanted in zip(made, exact, strict=True):
                    if not bool((ours - wanted).abs().max() <= GATE * wanted.abs().max()):
                        raise CheckFailed(f"rope contract: {what}: other numbers")
                for ours in made:  # its own memory: writing there changes no argument
                    ours.fill_(torch.nan)
                if not torch.equal(memory, before[0]):
                    raise CheckFailed(f"rope contract: {what}: the result is the argument")
