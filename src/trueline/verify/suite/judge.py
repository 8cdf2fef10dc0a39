"""Each half of each layer against the definition, on the inputs that the engine itself gave it.

So an error stays where it is made: a wrong layer does not make those behind it look wrong, and no
near-tie decides, because choices are taken from the engine once they are found to be right. What is
accepted comes from the same run: what an independent evaluation in the model's dtype, on the same
inputs, is off the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trueline.reference import ENDS, Reference
from trueline.reference.model import FEED, MIX, Half
from trueline.reference.v4_facts import SPARSE
from trueline.verify.report import Band, Place
from trueline.verify.suite import choices
from trueline.verify.suite.definition import EXACT, Definition
from trueline.verify.suite.observe import Observed

FACTOR = 6.0
"""How many times the noise of an independent evaluation is accepted: sums in another order, another
form of attention. What a run would have seen is measured beside it (power.py)."""
SMALL = 0.1
"""A row is measured against its own norm, or this part of the median row's where that is more."""
PARTS = ("entry", "selection", "experts", "mixer", "feed forward", "head")


class Off(NamedTuple):
    """An error at each position of a request in one part of one layer."""

    layer: int
    part: str
    composition: str
    request: int
    positions: Tensor
    values: Tensor


@dataclass
class Requests:
    """Of one composition."""

    composition: str
    observed: list[Observed]


@dataclass
class Judgement:
    offs: list[Off] = field(default_factory=list)
    bands: dict[tuple[str, str], float] = field(default_factory=dict)
    """Noise of a part in layers of a kind."""
    kinds: dict[int, dict[str, str]] = field(default_factory=dict)
    """By layer: what each part is."""
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """The definition's, from the engine's own residual, at every position of a request."""

    def band(self, layer: int, part: str) -> float:
        return self.bands.get((part, self.kinds.get(layer, {}).get(part, part)), 0.0)

    def gate(self, layer: int, part: str) -> float:
        floor = float(torch.finfo(torch.float32).eps)
        return FACTOR * max(self.band(layer, part), floor)

    def accepted(self, layer: int, part: str) -> float:
        """Choices are measured beyond what noise can swap."""
        return 0.0 if part in ("experts", "selection") else self.gate(layer, part)

    def wrong(self) -> Iterator[tuple[Off, int, float]]:
        """Each part that is off too far, at its first such position, with its worst value."""
        for off in self.offs:
            bad = ~(off.values <= self.accepted(off.layer, off.part))
            if bool(bad.any()):
                first = int(bad.nonzero()[0])
                worst = float(off.values.nan_to_num(torch.inf).max())
                yield off, int(off.positions[first]), worst

    def first_wrong(self, composition: str | None = None) -> tuple[Off, int, float] | None:
        """By layer, and by the order within a layer."""
        found = [each for each in self.wrong() if composition in (None, each[0].composition)]
        order = {part: i for i, part in enumerate(PARTS)}
        return min(found, key=lambda e: (e[0].layer, order[e[0].part], e[1]), default=None)

    def worst(self, layer: int, part: str, composition: str | None = None) -> float:
        values = [
            float(off.values.nan_to_num(torch.inf).max())
            for off in self.offs
            if (off.layer, off.part) == (layer, part)
            and composition in (None, off.composition)
            and len(off.values)
        ]
        return max(values, default=0.0)

    def named_bands(self, dtype: torch.dtype) -> list[Band]:
        name = str(dtype).removeprefix("torch.")
        floor = float(torch.finfo(torch.float32).eps)
        return [
            Band(what=f"{part}: {kind}" if kind != part else part, dtype=name, value=value,
                 gate=FACTOR * max(value, floor))
            for (part, kind), value in self.bands.items()
        ]  # fmt: skip


def relative(ours: Tensor, exact: Tensor) -> Tensor:
    """[T]: each row's error."""
    exact = exact.double()
    size = exact.norm(dim=-1)
    size = size.clamp_min(max(SMALL * float(size.median()), 1e-30))
    found: Tensor = (ours.double() - exact).norm(dim=-1) / size
    return found


def kind_names(ref: Reference, layer: int) -> dict[str, str]:
    """What a layer's parts are: noise differs by kind."""
    config, params = ref.config, ref.params
    at = f"model.layers.{layer}"
    if config.v4 is not None:
        mixer = f"compressed ({config.v4_facts.forms[layer]})"
    elif f"{at}.self_attn.query_key_value.weight" in params:
        mixer = "linear attention"
    elif config.indexer is not None:
        mixer = "sparse latent attention"
    else:
        mixer = "latent attention"
    moe = f"{at}.mlp.gate.weight" in params
    return {"mixer": mixer, "feed forward": "experts" if moe else "dense"}


class Judge:
    """`baseline`: which composition's requests the noise is measured on (their sequences are
    evaluated twice more)."""

    def __init__(self, definition: Definition, compute: torch.dtype, *, key_noise: float = 0.0):
        self.definition, self.compute = definition, compute
        self.key_noise = key_noise
        """Of index keys that are stored in fewer bits than they are computed in."""

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
        measured = [] if bands else [_Noise(self, r) for each in baseline for r in each.observed]
        with torch.no_grad(), self.definition.there():
            runs = [
                _Run(self, each.composition, i, request)
                for each in given
                for i, request in enumerate(each.observed)
                if request.count
            ]
            for layer in range(self.definition.num_layers):
                ref = self.definition.part(layer)
                made.kinds[layer] = kind_names(ref, layer)
                rough = self.definition.part(layer, self.compute) if measured else None
                for noise in measured:
                    assert rough is not None
                    noise.layer(layer, ref, rough, made)
                for run in runs:
                    if layers is None or layer in layers:
                        run.layer(layer, ref, made)
                    else:
                        run.follow(layer, ref)
            ends = self.definition.part(ENDS)
            for noise in measured:
                noise.head(ends, self.definition.part(ENDS, self.compute), made)
            for run in runs:
                run.head(ends, made)
        return made


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

    def __init__(self, judge: Judge, request: Observed) -> None:
        super().__init__(judge, request)
        with torch.no_grad(), self.definition.there():
            ids = torch.tensor(self.tokens)
            self.h = self.definition.part(ENDS).start(ids)
            self.rough = self.definition.part(ENDS, judge.compute).start(ids)

    def layer(self, layer: int, ref: Reference, rough: Reference, made: Judgement) -> None:
        for half, part in ((MIX, "mixer"), (FEED, "feed forward")):
            self._entry(layer, half, ref, rough, made)
            x = self.rows(layer, half)
            given = {"experts": self.experts(layer), "selected": self.selected(ref, layer)}
            exact = self._half(ref, layer, half, x.to(EXACT), "expanded", given)
            for form in ("expanded", "absorbed") if half == MIX else ("expanded",):
                ours = self._half(rough, layer, half, x.to(self.judge.compute), form, given)
                _widen(made, layer, part, float(relative(ours, exact).max()))
            self._choices(layer, half, x, ref, rough, made)
            y = self.rows(layer, half, outputs=True)
            self.h = ref.add(layer, half, self.h, y.to(EXACT))
            self.rough = rough.add(layer, half, self.rough, y.to(self.judge.compute))

    def _half(
        self,
        ref: Reference,
        layer: int,
        half: Half,
        x: Tensor,
        form: str,
        given: dict[str, dict[int, Tensor]],
    ) -> Tensor:
        sequence = self.definition.sequence(self.tokens, form=form, **given)
        return ref.mixed(layer, x, sequence) if half == MIX else ref.fed(layer, x, sequence)

    def _entry(
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


def _widen(made: Judgement, layer: int, part: str, value: float) -> None:
    key = part, made.kinds.get(layer, {}).get(part, part)
    made.bands[key] = max(made.bands.get(key, 0.0), value)


class _Run(_Sequence):
    """A request of the engine's, followed through the layers."""

    def __init__(self, judge: Judge, composition: str, index: int, request: Observed) -> None:
        super().__init__(judge, request)
        self.composition, self.index = composition, index
        self.at = torch.tensor(request.computed, device="cpu")
        self.h = self.definition.part(ENDS).start(torch.tensor(self.tokens))

    def note(self, made: Judgement, layer: int, part: str, values: Tensor) -> None:
        values = values.double().cpu()[self.at]
        made.offs.append(Off(layer, part, self.composition, self.index, self.at, values))

    def layer(self, layer: int, ref: Reference, made: Judgement) -> None:
        for half, part in ((MIX, "mixer"), (FEED, "feed forward")):
            x = self.rows(layer, half).to(EXACT)
            self.note(made, layer, "entry", relative(x, ref.entry(layer, half, self.h)))
            experts, selected = self.experts(layer), self.selected(ref, layer)
            if half == MIX:
                self._selection(layer, x, ref, selected, made)
            else:
                self._experts(layer, x, ref, experts, made)
            sequence = self.definition.sequence(self.tokens, experts=experts, selected=selected)
            exact = ref.mixed(layer, x, sequence) if half == MIX else ref.fed(layer, x, sequence)
            y = self.rows(layer, half, outputs=True)
            self.note(made, layer, part, relative(y, exact))
            self.h = ref.add(layer, half, self.h, y.to(EXACT))

    def follow(self, layer: int, ref: Reference) -> None:
        for half in (MIX, FEED):
            self.h = ref.add(layer, half, self.h, self.rows(layer, half, outputs=True).to(EXACT))

    def _experts(
        self, layer: int, x: Tensor, ref: Reference, experts: dict[int, Tensor], made: Judgement
    ) -> None:
        if not experts:
            return
        ids = experts[layer]
        table = choices.hashed_experts(ref, layer, torch.tensor(self.tokens))
        if table is not None:
            same = (ids.sort(-1).values == table.sort(-1).values).all(-1)
            self.note(made, layer, "experts", _infinite(~same))
            return
        scores = choices.expert_scores(ref, layer, x)
        assert scores is not None, "experts were chosen"
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
            self.definition.num_layers, "head", self.composition, self.index, torch.tensor(at),
            values,
        ))  # fmt: skip


def _infinite(wrong: Tensor) -> Tensor:
    return torch.zeros(len(wrong), dtype=EXACT).to(wrong.device).masked_fill(wrong, torch.inf)


def place_of(off: Off, position: int, request: Observed | None = None) -> Place:
    is_layer = off.part != "head"
    return Place(
        layer=off.layer if is_layer else None,
        part=off.part,
        composition=off.composition,
        request=off.request,
        position=position,
        path=request.paths.get(position) if request else None,
    )
