"""How far an independent evaluation in the model's dtype is off the definition: what is accepted of
an engine comes from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueline.reference import ENDS, Reference
from trueline.reference.model import FEED, MIX, Half
from trueline.verify.suite import choices, held, ties
from trueline.verify.suite.definition import EXACT
from trueline.verify.suite.held import Own
from trueline.verify.suite.itself import Evaluated, Itself
from trueline.verify.suite.judgement import CACHE_ROWS, ITSELF, BandOf, Judgement, Off, relative
from trueline.verify.suite.observe import Observed
from trueline.verify.suite.sequences import FORMS, PART_OF, RequestRows

if TYPE_CHECKING:
    from trueline.verify.suite.judge import Judge


class Noise(RequestRows):
    """How far the independent evaluation in the model's dtype is off."""

    h: Tensor
    own: Tensor
    rough: Tensor
    own_rough: Tensor
    exact: Tensor
    """The definition's output of the half seen last."""
    scores: choices.Scores | None
    """What it chooses by there."""

    def __init__(self, judge: Judge, composition: str, index: int, request: Observed) -> None:
        super().__init__(judge, request)
        self.key = composition, index
        self.itself = Itself(self.definition, self.tokens)

    def start(self) -> None:
        ids = torch.tensor(self.tokens)
        self.h = self.own = self.definition.part(ENDS).start(ids)
        self.rough = self.own_rough = self.definition.part(ENDS, self.judge.compute).start(ids)

    def layer(self, layer: int, ref: Reference, rough: Reference, made: Judgement) -> None:
        for half in PART_OF:
            self.entry(layer, half, ref, rough, made)
            given = self.half(layer, half, ref, rough, made)
            self._itself(layer, half, ref, given, made)
            y = self.rows(layer, half, outputs=True)
            self.h = ref.add(layer, half, self.h, y.to(EXACT))
            self.rough = rough.add(layer, half, self.rough, y.to(self.judge.compute))
            self.own = self._forward(ref, layer, half, self.own, given)
            with self._other_codes():
                self.own_rough = self._forward(rough, layer, half, self.own_rough, given)

    def _other_codes(self) -> AbstractContextManager[None]:
        """Where the definition rounds what it multiplies, noise takes other codes somewhere in a
        forward, and which ones is chance: so it does here."""
        if self.definition.numerics not in ties.ROUNDING:
            return nullcontext()
        return ties.moved(ties.DRAWS - 1, self.judge.compute)

    def half(
        self, layer: int, half: Half, ref: Reference, rough: Reference, made: Judgement
    ) -> dict[str, Any]:
        """Returns the choices that were taken."""
        x = self.rows(layer, half)
        given = {"experts": self.experts(layer), "selected": self.selected(layer)}
        with self.over_stored_rows(layer, half) as rows:
            exact = self._half(ref, layer, half, x.to(EXACT), "expanded", given)
        self.exact = exact
        for form in FORMS[half]:
            with self.over_stored_rows(layer, half) as rough_rows:
                ours = self._half(rough, layer, half, x.to(self.judge.compute), form, given)
            note_noise(made, layer, PART_OF[half], relative(ours, exact))
            self._rows(made, layer, rough_rows, rows)
        self._choices(layer, half, x, ref, rough, made)
        return given

    def _rows(self, made: Judgement, layer: int, rough: list[Own], exact: list[Own]) -> None:
        for one, two in zip(rough, exact, strict=True):
            widen(made, BandOf(CACHE_ROWS, CACHE_ROWS), held.noise(one, two))

    def _itself(
        self, layer: int, half: Half, ref: Reference, given: dict[str, Any], made: Judgement
    ) -> None:
        x = self.rows(layer, half).to(EXACT)
        taken = given["selected" if half == MIX else "experts"]
        over = partial(self.over_stored_rows, layer, half)
        off = self.itself.off(Evaluated(ref, layer, half, x, self.exact, taken, self.scores, over))
        at = torch.arange(len(off), device="cpu")
        made.offs.append(Off(layer, ITSELF, *self.key, at, off.cpu()))

    def _forward(
        self, ref: Reference, layer: int, half: Half, h: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Without the engine's numbers, but for its choices."""
        with self.over_stored_rows(layer, half):
            y = self._half(ref, layer, half, ref.entry(layer, half, h), "expanded", given)
        return ref.add(layer, half, h, y)

    def entry(
        self, layer: int, half: Half, ref: Reference, rough: Reference, made: Judgement
    ) -> None:
        exact, ours = ref.entry(layer, half, self.h), rough.entry(layer, half, self.rough)
        note_noise(made, layer, "entry", relative(ours, exact))

    def _choices(
        self, layer: int, half: Half, x: Tensor, ref: Reference, rough: Reference, made: Judgement
    ) -> None:
        if half == FEED:
            exact = choices.expert_scores(ref, layer, x.to(EXACT))
            ours = choices.expert_scores(rough, layer, x.to(self.judge.compute))
        else:
            sequence = self.definition.sequence(self.tokens)
            with self.over_stored_rows(layer) as keys:
                exact = choices.key_scores(ref, layer, x.to(EXACT), sequence)
            with self.over_stored_rows(layer) as rough_keys:
                ours = choices.key_scores(rough, layer, x.to(self.judge.compute), sequence)
            self._rows(made, layer, rough_keys, keys)
        self.scores = exact
        if exact is not None and ours is not None:
            part = "experts" if half == FEED else "selection"
            widen(made, BandOf(part, part), choices.noise(ours, exact))

    def head(self, ends: Reference, rough: Reference, made: Judgement) -> None:
        exact, ours = ends.head(self.h), rough.head(self.rough)
        note_noise(made, -1, "head", relative(ours, exact))
        own, own_rough = ends.head(self.own), rough.head(self.own_rough)
        made.forward[self.key] = _logprobs(own), _logprobs(own_rough)


def _logprobs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).cpu()


def note_noise(made: Judgement, layer: int, part: str, off: Tensor) -> None:
    """Of each row."""
    kind = made.kinds.get(layer, {}).get(part, part)
    widen(made, BandOf(part, kind), float(off.max()))
    widen(made, BandOf(part, kind, median=True), float(off.median()))


def widen(made: Judgement, of: BandOf, value: float) -> None:
    made.bands[of] = max(made.bands.get(of, 0.0), value)
