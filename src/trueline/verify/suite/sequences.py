"""One request followed through the layers: what the definition makes of the engine's own inputs,
and how far the engine is off that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueline.reference import ENDS, Reference
from trueline.reference.model import FEED, MIX, Half
from trueline.reference.v4_facts import SPARSE
from trueline.verify.suite import choices, ties
from trueline.verify.suite.definition import EXACT, Part
from trueline.verify.suite.held import Own
from trueline.verify.suite.judgement import (
    CACHE_ROWS,
    FACTOR,
    Judgement,
    Off,
    relative,
)
from trueline.verify.suite.observe import Observed

if TYPE_CHECKING:
    from trueline.verify.suite.judge import Judge

PART_OF = {MIX: "mixer", FEED: "feed forward"}
"""A layer's halves, in their order."""
MEDIAN_PARTS = ("entry", "mixer", "feed forward", "head")
"""Whose rows have noise each; of choices most rows have none."""
FORMS = {MIX: ("expanded", "absorbed"), FEED: ("expanded",)}
"""In which its noise is measured."""


class RequestRows:
    """One request's rows, as the definition takes them."""

    def __init__(self, judge: Judge, request: Observed) -> None:
        self.judge, self.request = judge, request
        self.definition = judge.definition
        self.tokens = request.tokens[: request.count]
        self.shared: Tensor | None = None  # what the last layer that chose for itself has chosen

    def rows(self, layer: int, half: Half, *, outputs: bool = False) -> Tensor:
        return self.request.rows((layer, half), outputs).to(self.definition.device)

    @contextmanager
    def over_stored_rows(self, layer: int, half: Half = MIX) -> Iterator[list[Own]]:
        """Meanwhile the definition attends to what the engine has stored, where that is rounded.
        The list gets its own rows."""
        rounded, kept = self.judge.rounded, self.request.stored.get(layer)
        if rounded is None or kept is None or half != MIX:
            yield []
            return
        count, device = self.request.count, self.definition.device
        rows = {
            name: torch.stack([row for p, row in sorted(by.items()) if p < count]).to(device)
            for name, by in kept.items()
            if any(p < count for p in by)
        }
        with rounded.attended(layer, rows) as own:
            yield own

    def experts(self, layer: int) -> dict[int, Tensor]:
        found = self.request.experts.get(layer)
        if not found:
            return {}
        rows = torch.stack([found[p] for p in range(self.request.count)])
        return {layer: rows.to(self.definition.device).long()}

    def selected(self, layer: int) -> dict[int, Tensor]:
        """Keys of every position, as the layer has chosen them."""
        config, count = self.definition.config, self.request.count
        if config.v4 is not None:
            v4 = config.v4_facts
            if v4.forms[layer] != SPARSE:
                return {}
            topk, ratio = v4.index_topk, v4.ratios[layer]
        elif config.indexer is None:
            return {}
        else:
            topk, ratio = config.indexer_facts.index_topk, 1
        chosen = self.request.chosen.get(layer, {})
        made = choices.all_visible(count, topk, ratio, chosen)
        return {layer: made.to(self.definition.device)}

    def _half(
        self,
        ref: Reference,
        layer: int,
        half: Half,
        x: Tensor,
        form: str,
        given: dict[str, Any],
    ) -> Tensor:
        sequence = self.definition.sequence(self.tokens, form=form, **given)
        return ref.mixed(layer, x, sequence) if half == MIX else ref.fed(layer, x, sequence)


class Run(RequestRows):
    """A request of the engine's, followed through the layers."""

    h: Tensor
    weights: Part | None = None  # of a layer's half, where the others are not there
    limited = False
    """Whether noise of single rows is no more than the band."""

    def __init__(self, judge: Judge, composition: str, index: int, request: Observed) -> None:
        super().__init__(judge, request)
        self.composition, self.index = composition, index
        self.at = torch.tensor(request.computed, device="cpu")
        self.exact: dict[str, Tensor] = {}
        """What the definition has for each part of the half seen last; of choices, their scores."""

    def start(self) -> None:
        self.h = self.definition.part(ENDS).start(torch.tensor(self.tokens))

    def note(self, made: Judgement, layer: int, part: str, values: Tensor) -> None:
        made.offs.append(self.off(layer, part, values.double().cpu()[self.at], self.at))

    def off(self, layer: int, part: str, values: Tensor, at: Tensor) -> Off:
        """At these positions."""
        decode = None
        if part in MEDIAN_PARTS:
            paths = self.request.paths
            found = [paths.get(p, "").startswith("decode") for p in at.tolist()]
            decode = torch.tensor(found, dtype=torch.bool, device="cpu")
        return Off(layer, part, self.composition, self.index, at, values, decode)

    def layer(self, layer: int, ref: Reference, made: Judgement) -> None:
        for half in PART_OF:
            self.entry(layer, half, ref, made)
            self.half(layer, half, ref, made)
            y = self.rows(layer, half, outputs=True)
            self.h = ref.add(layer, half, self.h, y.to(EXACT))

    def entry(self, layer: int, half: Half, ref: Reference, made: Judgement) -> None:
        exact = self.exact["entry"] = ref.entry(layer, half, self.h)
        self.note(made, layer, "entry", relative(self.rows(layer, half), exact))

    def half(self, layer: int, half: Half, ref: Reference, made: Judgement) -> None:
        """Its choices and its outputs, on its own inputs."""
        x = self.rows(layer, half).to(EXACT)
        experts, selected = self.experts(layer), self.selected(layer)
        if half == MIX:
            self._selection(layer, x, ref, selected, made)
        else:
            self._experts(layer, x, ref, experts, made)
        sequence = self.definition.sequence(self.tokens, experts=experts, selected=selected)
        y, part = self.rows(layer, half, outputs=True), PART_OF[half]

        def evaluated() -> tuple[Tensor, list[Own]]:
            with self.over_stored_rows(layer, half) as rows:
                mixing = half == MIX
                return (ref.mixed if mixing else ref.fed)(layer, x, sequence), rows

        self.exact[part], rows = evaluated()
        self._stored(made, layer, rows)

        def off(values: Tensor) -> Off:
            return self.off(layer, part, values.double().cpu()[self.at], self.at)

        found = off(self._settled(
            relative(y, self.exact[part]), lambda values: not made.wrong_of(off(values)),
            lambda: relative(y, evaluated()[0]),
        ))  # fmt: skip
        if made.wrong_of(found):
            noise = self._noise(layer, half, {"experts": experts, "selected": selected})
            if self.limited:
                noise = [each.clamp_max(made.band(layer, part)) for each in noise]
            found = self._beyond_noise(found, noise, made.gate(layer, part))
        made.offs.append(found)

    def _stored(self, made: Judgement, layer: int, rows: list[Own]) -> None:
        """What the caches hold, where it is rounded."""
        if not rows:
            return
        assert self.judge.rounded is not None
        accepted = made.gate(layer, CACHE_ROWS)
        wrong = [self.judge.rounded.wrong(each, accepted, len(self.tokens)) for each in rows]
        self.exact[CACHE_ROWS] = rows[0].own
        self.note(made, layer, CACHE_ROWS, torch.stack(wrong).amax(0))

    def _settled(
        self, off: Tensor, is_right: Callable[[Tensor], bool], again: Callable[[], Tensor]
    ) -> Tensor:
        """[T]: the least error of a row, where noise decides which code a number gets that the
        definition rounds."""
        if self.definition.numerics not in ties.ROUNDING:
            return off
        for draw in range(ties.DRAWS):
            if is_right(off):
                break
            with ties.moved(draw, self.judge.compute):
                off = torch.fmin(off, again())
        return off

    def _beyond_noise(self, off: Off, noise: list[Tensor], accepted: float) -> Off:
        """Rows that are off too far, but no further than noise of their own explains, count as
        accepted: where sums nearly cancel, or in a long context, it is larger than that of the
        rows of the band."""
        values = off.values
        for each in noise:
            values = values.where(values > FACTOR * each, values.clamp_max(accepted))
        return off._replace(values=values, noise=torch.stack(noise).amax(0))

    def _noise(self, layer: int, half: Half, given: dict[str, Any]) -> list[Tensor]:
        """Of each row, in each form."""
        part = layer if self.weights is None else self.weights
        rough, x = self.definition.part(part, self.judge.compute), self.rows(layer, half)
        found = []
        for form in FORMS[half]:
            with self.over_stored_rows(layer, half):
                ours = self._half(rough, layer, half, x.to(self.judge.compute), form, given)
            noise = relative(ours, self.exact[PART_OF[half]])
            found.append(noise.double().cpu()[self.at])
        return found

    def follow(self, layer: int) -> None:
        for half in PART_OF:
            self.add(layer, half)
        config = self.definition.config
        own = config.indexer is not None and not config.indexer_facts.shared[layer]
        if config.v4 is None and own:
            self.shared = self.selected(layer)[layer]  # layers behind it may take its choice

    def add(self, layer: int, half: Half) -> None:
        part: Part = ENDS
        if self.definition.config.v4 is not None:  # streams are mixed by weights of the layer
            small = (f"model.layers.{layer}.{half.mixing}.",)
            part = layer if self.definition.room is None else small
        ref = self.definition.part(part)
        self.h = ref.add(layer, half, self.h, self.rows(layer, half, outputs=True).to(EXACT))

    def _experts(
        self, layer: int, x: Tensor, ref: Reference, experts: dict[int, Tensor], made: Judgement
    ) -> None:
        if not experts:
            return
        ids = experts[layer]
        table = choices.hashed_experts(ref, layer, torch.tensor(self.tokens))
        if table is not None:
            self.exact["experts"] = table
            same = (ids.sort(-1).values == table.sort(-1).values).all(-1)
            self.note(made, layer, "experts", _infinite(~same))
            return
        scores = choices.expert_scores(ref, layer, x)
        assert scores is not None, "experts were chosen"
        self.exact["experts"] = scores.values
        accepted = made.gate(layer, "experts")
        off = choices.wrong_choice(scores, ids, accepted).clamp_min(0)
        right = choices.counts_are_right(ids, ref.config.num_experts_per_tok)
        self.note(made, layer, "experts", off.where(right, torch.inf))

    def _selection(
        self, layer: int, x: Tensor, ref: Reference, selected: dict[int, Tensor], made: Judgement
    ) -> None:
        if not selected:
            return
        sequence = self.definition.sequence(self.tokens)

        def scored() -> tuple[choices.Scores | None, list[Own]]:
            with self.over_stored_rows(layer) as rows:
                return choices.key_scores(ref, layer, x, sequence), rows

        scores, keys = scored()
        self._stored(made, layer, keys)
        if scores is None:  # it takes what the layer before has chosen
            before = self.shared
            assert before is not None, "some layer before has chosen"
            same = (selected[layer].sort(-1).values == before.sort(-1).values).all(-1)
            self.note(made, layer, "selection", _infinite(~same))
            return
        ids = self.shared = selected[layer]
        self.exact["selection"] = scores.values
        visible = scores.values.isfinite().sum(-1).clamp_max(ids.shape[1])
        accepted = made.gate(layer, "selection") + self.judge.key_noise

        def wrong(found: choices.Scores | None) -> Tensor:
            assert found is not None, "it has chosen"
            return choices.wrong_choice(found, ids, accepted).clamp_min(0)

        off = self._settled(wrong(scores), _none, lambda: wrong(scored()[0]))
        right = choices.counts_are_right(ids, visible)
        self.note(made, layer, "selection", off.where(right, torch.inf))

    def head(self, ends: Reference, made: Judgement) -> None:
        """Logits of what the engine's own halves add up to."""
        exact = ends.head(self.h).cpu()
        made.logits[self.composition, self.index] = exact
        ours = self.request.logits
        at = [p for p in self.request.computed if p in ours]
        values = relative(torch.stack([ours[p] for p in at]), exact[at])
        where = torch.tensor(at, device="cpu")
        made.offs.append(self.off(self.definition.num_layers, "head", values, where))


def _none(off: Tensor) -> bool:
    """Nothing is off."""
    return bool((off <= 0).all())


def _infinite(wrong: Tensor) -> Tensor:
    return torch.zeros(len(wrong), dtype=EXACT).to(wrong.device).masked_fill(wrong, torch.inf)
