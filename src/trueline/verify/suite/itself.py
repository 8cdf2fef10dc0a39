"""The definition against itself, in float64. Where it is held against the engine it takes the
engine's choices and one of its two forms: its own choices and its other form may contradict it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.models import config_file
from trueline.reference import Reference, Selections
from trueline.reference.model import FEED, MIX, Half, Sequence
from trueline.spec.fields import read_json
from trueline.verify.indexer import index_sum
from trueline.verify.suite import choices, ties
from trueline.verify.suite.choices import Scores
from trueline.verify.suite.definition import EXACT, Definition
from trueline.verify.suite.judgement import ITSELF_GATE, relative

Choices = dict[int, Tensor]
"""By layer, [T, chosen]."""


@dataclass(frozen=True)
class Evaluated:
    """A half of a layer, as the definition has computed it."""

    ref: Reference
    layer: int
    half: Half
    x: Tensor
    y: Tensor
    taken: Choices
    """That it was given."""
    scores: Scores | None
    """By which it would choose for itself."""
    over: Callable[[], AbstractContextManager[object]]
    """Within which it is evaluated once more."""

    def again(self, sequence: Sequence) -> Tensor:
        run = self.ref.mixed if self.half == MIX else self.ref.fed
        with self.over():
            return run(self.layer, self.x, sequence)


class Itself:
    """A sequence of tokens, whose layers the definition computes in several ways."""

    def __init__(self, definition: Definition, tokens: list[int]) -> None:
        self.definition, self.tokens = definition, tokens
        self.before: Choices = {}
        """Of the layer that chose last, as the layers behind it that share its choice take it."""

    def off(self, made: Evaluated) -> Tensor:
        """[T]: how far the definition is from itself; infinite where it chooses what its scores do
        not say."""
        off = torch.zeros(len(made.x), dtype=EXACT, device=made.x.device)
        if made.layer in made.taken:
            off = self._choosing(made)
        if made.half == MIX:
            sequence = self.definition.sequence(self.tokens, form="absorbed", selected=made.taken)
            off = torch.maximum(off, relative(made.again(sequence), made.y))
            if made.scores is not None:
                off = torch.maximum(off, self._scores(made, made.scores))
        return off

    def _choosing(self, made: Evaluated) -> Tensor:
        """What it chooses by itself is what its scores say, and where that is what it was given,
        its output is the same."""
        sequence = self.definition.sequence(self.tokens)
        taken, due = made.taken[made.layer], made.ref.config.num_experts_per_tok
        if made.half == FEED:
            found = sequence.trace = {}
            wanted = choices.hashed_experts(made.ref, made.layer, sequence.tokens)
        else:
            sequence.selections = Selections(dict(self.before), {})
            found, wanted = sequence.selections.made, self.before.get(made.layer - 1)
        y = made.again(sequence)
        own = found[made.layer]
        if made.half == MIX:
            self.before = {made.layer: own}
        if made.scores is None:
            assert wanted is not None, "it chooses by scores or takes what is given"
            right = _same(own, wanted)
        else:
            seen = made.scores.values.isfinite().sum(-1).clamp_max(taken.shape[1])
            right = choices.wrong_choice(made.scores, own, ITSELF_GATE) <= 0
            right &= choices.counts_are_right(own, due if made.half == FEED else seen)
        off = relative(y, made.y)
        return off.where(_same(own, taken), 0.0).masked_fill(~right, torch.inf)

    def _scores(self, made: Evaluated, scores: Scores) -> Tensor:
        """Of keys, against the sum that they stand for."""
        definition, x = self.definition, made.x
        if made.ref.config.indexer is None or definition.numerics in ties.ROUNDING:
            return torch.zeros(len(x), dtype=EXACT, device=x.device)
        raw = read_json(config_file(definition.model))
        table, _ = made.ref.ropes(definition.sequence(self.tokens).places, x.dtype)
        plain = index_sum(raw, made.ref.params, made.layer, x, table)
        wrong = (plain - scores.values).abs().where(scores.values.isfinite(), 0.0).amax(-1)
        return wrong / scores.size.clamp_min(1e-30)


def _same(one: Tensor, two: Tensor) -> Tensor:
    """[T]: the same choices, in any order."""
    if one.shape != two.shape:
        return torch.zeros(len(two), dtype=torch.bool, device=two.device)
    return (one.sort(-1).values == two.sort(-1).values).all(-1)
