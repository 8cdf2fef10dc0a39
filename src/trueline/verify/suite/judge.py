"""Each half of each layer against the definition, on the inputs that the engine itself gave it.

So an error stays where it is made: a wrong layer does not make those behind it look wrong, and no
near-tie decides, because choices are taken from the engine once they are found to be right. What is
accepted comes from the same run: what an independent evaluation in the model's dtype, on the same
inputs, is off the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trueline.reference import ENDS, Reference
from trueline.reference.model import FEED, MIX, Half
from trueline.reference.v4_facts import SPARSE
from trueline.verify.suite import choices
from trueline.verify.suite.definition import EXACT, Definition, Part
from trueline.verify.suite.judgement import Judgement, Off, Requests, kind_names, relative
from trueline.verify.suite.observe import Key, Observed

PART_OF = {MIX: "mixer", FEED: "feed forward"}
"""A layer's halves, in their order."""


class Judge:
    """`baseline`: which composition's requests the noise is measured on (their sequences are
    evaluated twice more)."""

    def __init__(self, definition: Definition, compute: torch.dtype, *, key_noise: float = 0.0):
        self.definition, self.compute = definition, compute
        self.key_noise = key_noise
        """Of index keys that are stored in fewer bits than they are computed in."""
        self.progress: Callable[[int, int], None] = lambda layer, count: None

    def sequence(self, request: Observed) -> _Sequence:
        return _Sequence(self, request)

    def judge(
        self,
        given: Sequence[Requests],
        baseline: Sequence[Requests],
        bands: Judgement | None = None,
        layers: Sequence[int] | None = None,
    ) -> Judgement:
        """`bands`: of another judgement, instead of measuring. `layers`: only these and the head;
        through the others the residual is followed."""
        made = Judgement(bands=dict(bands.bands) if bands else {})
        measured = [] if bands else [
            _Noise(self, each.composition, i, request)
            for each in baseline
            for i, request in enumerate(each.observed)
        ]  # fmt: skip
        with torch.no_grad(), self.definition.there():
            runs = [
                _Run(self, each.composition, i, request)
                for each in given
                for i, request in enumerate(each.observed)
                if request.count
            ]
            for noise in measured:
                noise.start()
            for run in runs:
                run.start()
            for layer in range(self.definition.num_layers):
                self.progress(layer, self.definition.num_layers)
                if layers is not None and layer not in layers:
                    for run in runs:
                        run.follow(layer)
                    continue
                ref = self.definition.part(layer)
                made.kinds[layer] = kind_names(ref, layer)
                for noise in measured:
                    noise.layer(layer, ref, self.definition.part(layer, self.compute), made)
                for run in runs:
                    run.layer(layer, ref, made)
            ends = self.definition.part(ENDS)
            for noise in measured:
                noise.head(ends, self.definition.part(ENDS, self.compute), made)
            for run in runs:
                run.head(ends, made)
        return made

    def residual(self, request: Observed, layer: int, half: Half) -> Tensor:
        """What the engine's own halves before this one add up to."""
        with torch.no_grad(), self.definition.there():
            run = _Run(self, "", 0, request)
            run.start()
            for before in range(layer):
                run.follow(before)
            if half == FEED:
                run.add(layer, MIX)
        return run.h

    def one_half(
        self,
        key: Key,
        request: Observed,
        weights: Part,
        bands: Judgement | None = None,
        *,
        residual: Tensor | None = None,
        shared: Tensor | None = None,
        measured: bool = True,
    ) -> tuple[Judgement, dict[str, Tensor]]:
        """One half of one layer alone, and what the definition has for each part of it. `residual`:
        before it, where its entry is to be judged; `shared`: keys that the layer before has
        chosen, where this one takes them; `measured`: whether noise here widens `bands`."""
        layer, half = key
        made = Judgement(bands=dict(bands.bands) if bands else {})
        with torch.no_grad(), self.definition.there():
            ref = self.definition.part(weights)
            made.kinds[layer] = kind_names(ref, layer)
            run, noise = _Run(self, "", 0, request), _Noise(self, "", 0, request)
            rough = self.definition.part(weights, self.compute) if measured else None
            if residual is not None:
                run.h = noise.h = residual
                noise.rough = residual.to(self.compute)
                if rough is not None:
                    noise.entry(layer, half, ref, rough, made)
                run.entry(layer, half, ref, made)
            if request.outputs.get(key):
                run.shared = None if shared is None else shared.to(self.definition.device)
                if rough is not None:
                    noise.half(layer, half, ref, rough, made)
                run.half(layer, half, ref, made)
        return made, run.exact

    def the_head(
        self, request: Observed, residual: Tensor, bands: Judgement, *, measured: bool = True
    ) -> tuple[Judgement, dict[str, Tensor]]:
        made = Judgement(bands=dict(bands.bands))
        with torch.no_grad(), self.definition.there():
            ends = self.definition.part(ENDS)
            run = _Run(self, "", 0, request)
            run.h = residual
            if measured:
                ours = self.definition.part(ENDS, self.compute).head(residual.to(self.compute))
                _widen(made, -1, "head", float(relative(ours, ends.head(residual)).max()))
            run.head(ends, made)
        return made, {"head": made.logits["", 0]}


class _Sequence:
    """One request's rows, as the definition takes them."""

    def __init__(self, judge: Judge, request: Observed) -> None:
        self.judge, self.request = judge, request
        self.definition = judge.definition
        self.tokens = request.tokens[: request.count]
        self.shared: Tensor | None = None
        """What the last layer that chose for itself has chosen."""

    def rows(self, layer: int, half: Half, *, outputs: bool = False) -> Tensor:
        return self.request.rows((layer, half), outputs).to(self.definition.device)

    def experts(self, layer: int) -> dict[int, Tensor]:
        found = self.request.experts.get(layer)
        if not found:
            return {}
        rows = torch.stack([found[p] for p in range(self.request.count)])
        return {layer: rows.to(self.definition.device).long()}

    def selected(self, ref: Reference, layer: int) -> dict[int, Tensor]:
        """Keys of every position, as the layer has chosen them."""
        config, count = ref.config, self.request.count
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


class _Noise(_Sequence):
    """How far the independent evaluation in the model's dtype is off."""

    h: Tensor
    own: Tensor
    rough: Tensor
    own_rough: Tensor

    def __init__(self, judge: Judge, composition: str, index: int, request: Observed) -> None:
        super().__init__(judge, request)
        self.key = composition, index

    def start(self) -> None:
        ids = torch.tensor(self.tokens)
        self.h = self.own = self.definition.part(ENDS).start(ids)
        self.rough = self.own_rough = self.definition.part(ENDS, self.judge.compute).start(ids)

    def layer(self, layer: int, ref: Reference, rough: Reference, made: Judgement) -> None:
        for half in PART_OF:
            self.entry(layer, half, ref, rough, made)
            given = self.half(layer, half, ref, rough, made)
            y = self.rows(layer, half, outputs=True)
            self.h = ref.add(layer, half, self.h, y.to(EXACT))
            self.rough = rough.add(layer, half, self.rough, y.to(self.judge.compute))
            self.own = self._forward(ref, layer, half, self.own, given)
            self.own_rough = self._forward(rough, layer, half, self.own_rough, given)

    def half(
        self, layer: int, half: Half, ref: Reference, rough: Reference, made: Judgement
    ) -> dict[str, Any]:
        """Returns the choices that were taken."""
        x = self.rows(layer, half)
        given = {"experts": self.experts(layer), "selected": self.selected(ref, layer)}
        exact = self._half(ref, layer, half, x.to(EXACT), "expanded", given)
        for form in ("expanded", "absorbed") if half == MIX else ("expanded",):
            ours = self._half(rough, layer, half, x.to(self.judge.compute), form, given)
            _widen(made, layer, PART_OF[half], float(relative(ours, exact).max()))
        self._choices(layer, half, x, ref, rough, made)
        return given

    def _forward(
        self, ref: Reference, layer: int, half: Half, h: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Without the engine's numbers, but for its choices."""
        y = self._half(ref, layer, half, ref.entry(layer, half, h), "expanded", given)
        return ref.add(layer, half, h, y)

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

    def entry(
        self, layer: int, half: Half, ref: Reference, rough: Reference, made: Judgement
    ) -> None:
        exact, ours = ref.entry(layer, half, self.h), rough.entry(layer, half, self.rough)
        _widen(made, layer, "entry", float(relative(ours, exact).max()))

    def _choices(
        self, layer: int, half: Half, x: Tensor, ref: Reference, rough: Reference, made: Judgement
    ) -> None:
        if half == FEED:
            exact = choices.expert_scores(ref, layer, x.to(EXACT))
            ours = choices.expert_scores(rough, layer, x.to(self.judge.compute))
        else:
            sequence = self.definition.sequence(self.tokens)
            exact = choices.key_scores(ref, layer, x.to(EXACT), sequence)
            ours = choices.key_scores(rough, layer, x.to(self.judge.compute), sequence)
        if exact is not None and ours is not None:
            part = "experts" if half == FEED else "selection"
            _widen(made, layer, part, choices.noise(ours, exact))

    def head(self, ends: Reference, rough: Reference, made: Judgement) -> None:
        exact, ours = ends.head(self.h), rough.head(self.rough)
        _widen(made, -1, "head", float(relative(ours, exact).max()))
        own, own_rough = ends.head(self.own), rough.head(self.own_rough)
        made.forward[self.key] = _logprobs(own), _logprobs(own_rough)


def _logprobs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).cpu()


def _widen(made: Judgement, layer: int, part: str, value: float) -> None:
    key = part, made.kinds.get(layer, {}).get(part, part)
    made.bands[key] = max(made.bands.get(key, 0.0), value)


class _Run(_Sequence):
    """A request of the engine's, followed through the layers."""

    h: Tensor

    def __init__(self, judge: Judge, composition: str, index: int, request: Observed) -> None:
        super().__init__(judge, request)
        self.composition, self.index = composition, index
        self.at = torch.tensor(request.computed, device="cpu")
        self.exact: dict[str, Tensor] = {}
        """What the definition has for each part of the half seen last; of choices, their scores."""

    def start(self) -> None:
        self.h = self.definition.part(ENDS).start(torch.tensor(self.tokens))

    def note(self, made: Judgement, layer: int, part: str, values: Tensor) -> None:
        values = values.double().cpu()[self.at]
        made.offs.append(Off(layer, part, self.composition, self.index, self.at, values))

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
        experts, selected = self.experts(layer), self.selected(ref, layer)
        if half == MIX:
            self._selection(layer, x, ref, selected, made)
        else:
            self._experts(layer, x, ref, experts, made)
        sequence = self.definition.sequence(self.tokens, experts=experts, selected=selected)
        exact = ref.mixed(layer, x, sequence) if half == MIX else ref.fed(layer, x, sequence)
        self.exact[PART_OF[half]] = exact
        y = self.rows(layer, half, outputs=True)
        self.note(made, layer, PART_OF[half], relative(y, exact))

    def follow(self, layer: int) -> None:
        for half in PART_OF:
            self.add(layer, half)

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
        scores = choices.key_scores(ref, layer, x, self.definition.sequence(self.tokens))
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
        off = choices.wrong_choice(scores, ids, accepted).clamp_min(0)
        right = choices.counts_are_right(ids, visible)
        self.note(made, layer, "selection", off.where(right, torch.inf))

    def head(self, ends: Reference, made: Judgement) -> None:
        """Logits of what the engine's own halves add up to."""
        exact = ends.head(self.h).cpu()
        made.logits[self.composition, self.index] = exact
        ours = self.request.logits
        at = [p for p in self.request.computed if p in ours]
        values = relative(torch.stack([ours[p] for p in at]), exact[at])
        made.offs.append(Off(
            self.definition.num_layers, "head", self.composition, self.index,
            torch.tensor(at, device="cpu"), values,
        ))  # fmt: skip


def _infinite(wrong: Tensor) -> Tensor:
    return torch.zeros(len(wrong), dtype=EXACT).to(wrong.device).masked_fill(wrong, torch.inf)
