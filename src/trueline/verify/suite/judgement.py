"""What was found: errors of each part of each layer, beside what noise alone makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trueline.reference import Reference
from trueline.verify.report import Band, Place
from trueline.verify.suite.observe import Observed

FACTOR = 12.0
"""How many times the noise of an independent evaluation is accepted: sums in another order, another
form of attention. What a run would have seen is measured beside it (power.py)."""
MEDIAN_FACTOR = 4.0
"""The same for the median row: an error of every row stands out of noise long before its worst
row does."""
MEDIAN_OF = 5
"""Rows at least."""
SMALL = 0.1
"""A row is measured against its own norm, or this part of the median row's where that is more."""
FLOOR = float(torch.finfo(torch.float32).eps)
"""Of noise."""
CACHE_ROWS = "cache rows"
"""What the caches hold, where that is rounded: then the definition attends to it."""
ITSELF, ITSELF_GATE = "definition", 1e-9
"""The definition against itself in float64: two orders of the same sums, which differ by 1e-13 at
most in what has been seen."""
PARTS = (ITSELF, "entry", CACHE_ROWS, "selection", "experts", "mixer", "feed forward", "head")


class Off(NamedTuple):
    """An error at each position of a request in one part of one layer."""

    layer: int
    part: str
    composition: str
    request: int
    positions: Tensor
    values: Tensor
    decode: Tensor | None = None
    """Which of them were computed in decode; None: medians tell nothing of this part."""
    noise: Tensor | None = None
    """Of these rows themselves, where it was measured."""


class BandOf(NamedTuple):
    """Whose noise: of a part in layers of a kind, in the worst row or in the median one."""

    part: str
    kind: str
    median: bool = False

    def __str__(self) -> str:
        what = self.part if self.kind == self.part else f"{self.part}: {self.kind}"
        return median(what) if self.median else what


class Finding(NamedTuple):
    """What is off too far."""

    off: Off
    position: int
    """The first."""
    value: float
    """The worst, or the median."""
    accepted: float
    band: float
    rows: str = ""
    """Of which rows it is the median."""

    def __str__(self) -> str:
        where = f" ({self.rows})" if self.rows else ""
        return f"off by {self.value:.3g}{where}, accepted {self.accepted:.3g}"


@dataclass
class Requests:
    """Of one composition."""

    composition: str
    observed: list[Observed]


@dataclass
class Judgement:
    offs: list[Off] = field(default_factory=list)
    bands: dict[BandOf, float] = field(default_factory=dict)
    kinds: dict[int, dict[str, str]] = field(default_factory=dict)
    """By layer: what each part is."""
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """The definition's, from the engine's own residual, at every position of a request."""
    forward: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Logprobs of the definition's own forward over a request that noise was measured on, in
    float64 and in the model's dtype. Choices that the engine made are taken."""

    def of(self, composition: str) -> Judgement:
        """What concerns one composition."""
        logits = {key: value for key, value in self.logits.items() if key[0] == composition}
        return replace(
            self, offs=[off for off in self.offs if off.composition == composition], logits=logits
        )

    def only(self, *parts: str) -> Judgement:
        return replace(self, offs=[off for off in self.offs if off.part in parts])

    def band(self, layer: int, part: str, *, median: bool = False) -> float:
        kind = self.kinds.get(layer, {}).get(part, part)
        return self.bands.get(BandOf(part, kind, median), 0.0)

    def limit(self, most: Mapping[BandOf, float]) -> None:
        """Noise is no more than that, whatever was measured."""
        self.bands = {of: min(value, most.get(of, 0.0)) for of, value in self.bands.items()}

    def gate(self, layer: int, part: str) -> float:
        return FACTOR * max(self.band(layer, part), FLOOR)

    def accepted(self, layer: int, part: str) -> float:
        """Choices and codes are measured beyond what noise can swap."""
        if part == ITSELF:
            return ITSELF_GATE
        return 0.0 if part in ("experts", "selection", CACHE_ROWS) else self.gate(layer, part)

    def wrong(self) -> Iterator[Finding]:
        """Each part that is off too far, in its worst row or in the median one."""
        for off in self.offs:
            yield from self.wrong_of(off)

    def wrong_of(self, off: Off) -> list[Finding]:
        accepted = self.accepted(off.layer, off.part)
        bad = ~(off.values <= accepted)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            worst = float(off.values.nan_to_num(torch.inf).max())
            band = self.band(off.layer, off.part)
            return [Finding(off, int(off.positions[first]), worst, accepted, band)]
        return [each for each in self.medians(off) if each.value > each.accepted]

    def medians(self, off: Off) -> Iterator[Finding]:
        """Of rows in decode and of the others, where there are enough."""
        if off.decode is None:
            return
        of_part = self.band(off.layer, off.part, median=True)
        for path, rows in (("prefill", ~off.decode), ("decode", off.decode)):
            values, positions = off.values[rows].nan_to_num(torch.inf), off.positions[rows]
            if len(values) < MEDIAN_OF:
                continue
            value = float(values.median())
            first = int(positions[values >= value][0])
            own = 0.0 if off.noise is None else float(off.noise[rows].median())
            band, told = max(of_part, own), f"median of {len(values)} rows in {path}"
            yield Finding(off, first, value, MEDIAN_FACTOR * max(band, FLOOR), band, told)

    def first_wrong(self, composition: str | None = None) -> Finding | None:
        """By layer, and by the order within a layer."""
        found = [each for each in self.wrong() if composition in (None, each.off.composition)]
        order = {part: i for i, part in enumerate(PARTS)}
        return min(found, key=lambda e: (e.off.layer, order[e.off.part], e.position), default=None)

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
        return [
            Band(what=str(of), dtype=name, value=value,
                 gate=(MEDIAN_FACTOR if of.median else FACTOR) * max(value, FLOOR))
            for of, value in self.bands.items()
        ]  # fmt: skip


def median(part: str) -> str:
    """What is told of a part's median row."""
    return f"{part}, median row"


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
