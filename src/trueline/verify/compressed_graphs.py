"""Captured decode steps of compressed attention: which rows complete a window, which see entries,
and how many, is in their buffers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trueline.models import read_model
from trueline.spec.mixer import CompressedSpec
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, EngineRun
from trueline.verify.failed import CheckFailed
from trueline.verify.graphs import CapturedStep, TwoTurns, two_turns
from trueline.verify.schedules import base, prompt

WHAT = "graph = eager, compressed"


@dataclass(frozen=True)
class Sizes:
    """Positions of an entry that is chosen, and of one that all attend to; of the window; and the
    most that a token sees while it attends to all entries."""

    sparse: int
    every: int
    window: int
    few: int

    @staticmethod
    def of(subject: Subject) -> Sizes:
        mixers = {
            layer.mixer.form: layer.mixer
            for layer in read_model(subject.model, subject.facts).layers
            if isinstance(layer.mixer, CompressedSpec)
        }
        sparse, every = mixers["sparse"], mixers["all"]
        assert sparse.indexer is not None
        assert sparse.compressor is not None
        assert every.compressor is not None
        ratio = sparse.compressor.ratio
        few = (sparse.indexer.topk + 1) * ratio - 1
        return Sizes(ratio, every.compressor.ratio, sparse.window, few)

    def asks(self) -> list[Ask]:
        """Answers across the first windows, the second one of the larger, the edge of the window of
        positions, and the length from which on a token chooses."""
        ends = (self.sparse, self.every, 2 * self.every - 1, self.few - 2, 2 * self.few - 6)
        return [Ask(prompt(end - 2, i), 9, arrives=3 * i) for i, end in enumerate(sorted(ends))]


Situation = Callable[[Sizes, CapturedStep], bool]


def _completes(position: int, ratio: int) -> bool:
    return (position + 1) % ratio == 0


def _some(ratio: Callable[[Sizes], int]) -> Situation:
    """Rows that complete a window beside rows that do not, and padding."""

    def holds(sizes: Sizes, step: CapturedStep) -> bool:
        found = {_completes(each, ratio(sizes)) for each in step.positions}
        return found == {True, False} and step.key.size > step.rows

    return holds


SITUATIONS: dict[str, Situation] = {
    "some complete an entry to choose from": _some(lambda sizes: sizes.sparse),
    "some complete an entry for all": _some(lambda sizes: sizes.every),
    "nobody completes any": lambda sizes, step: (
        not any(
            _completes(each, ratio)
            for each in step.positions
            for ratio in (sizes.sparse, sizes.every)
        )
    ),
    "the first window": lambda sizes, step: sizes.sparse - 1 in step.positions,
    "the first window of all": lambda sizes, step: sizes.every - 1 in step.positions,
    "a row without entries": lambda sizes, step: min(step.positions) + 1 < sizes.sparse,
    "rows on both sides of the window's edge": lambda sizes, step: (
        min(step.positions) < sizes.window <= max(step.positions)
    ),
    "all see all entries": lambda sizes, step: (
        max(step.positions) + 1 <= sizes.few == step.key.longest
    ),
    "rows that choose beside rows that need not": lambda sizes, step: (
        min(step.positions) + 1 <= sizes.few < max(step.positions) + 1 <= step.key.longest
    ),
    "rows that choose, and padding": lambda sizes, step: (
        sizes.few < step.key.longest and step.key.size > step.rows
    ),
}


def compressed_graph_is_eager(subject: Subject) -> None:
    """With NaN in all that nobody owns. Second turns go on from what captured steps have left:
    windows, entries, and the tails that were known where a cached prefix ends."""
    sizes = Sizes.of(subject)
    asks = sizes.asks()
    config = replace(base(subject), poison=True, max_model_len=max(400, 3 * sizes.every))

    def turns(done: EngineRun) -> list[Ask]:
        return [
            Ask([*ask.prompt, *tokens, 7], sizes.sparse + 1)
            for ask, tokens in zip(asks, done.tokens, strict=True)
        ]

    seen = two_turns(WHAT, subject, config, asks, turns)
    missing = [
        what
        for what, holds in SITUATIONS.items()
        if not any(holds(sizes, step) for step in seen.steps)
    ]
    if missing:
        raise CheckFailed(f"{WHAT}: never happened: {', '.join(missing)}")
    _check_cached(seen, asks)


def _check_cached(seen: TwoTurns, asks: list[Ask]) -> None:
    """Up to a boundary inside of an answer: its tails are those of captured steps."""
    if not any(
        cached > len(ask.prompt) for cached, ask in zip(seen.second.cached, asks, strict=True)
    ):
        raise CheckFailed(f"{WHAT}: second turns found {seen.second.cached} tokens cached")


COMPRESSED_GRAPH_CHECKS: dict[str, Callable[[Subject], None]] = {WHAT: compressed_graph_is_eager}
