"""Errors along layers, positions and compositions, for the report's plots."""

from __future__ import annotations

from trueline.verify.report import Curve
from trueline.verify.suite.judgement import FACTOR, ITSELF, Judgement, Off
from trueline.verify.suite.numbers import Numbers, ratio


def curves(numbers: Numbers) -> list[Curve]:
    made: list[Curve] = []
    if not numbers.judged:
        return made
    name, base = next(iter(numbers.judged.items()))
    layers = range(numbers.session.definition.num_layers)
    made.extend(
        Curve(
            title=f"{part} by layer",
            along="layer",
            labels=[str(layer) for layer in layers],
            values=[base.worst(layer, part) for layer in layers],
            band=[base.band(layer, part) for layer in layers],
            gate=[base.gate(layer, part) for layer in layers],
        )
        for part in ("entry", "mixer", "feed forward")
    )
    by_position: dict[int, float] = {}
    for off in base.offs:
        if off.part in ("mixer", "feed forward"):
            for p, value in zip(off.positions.tolist(), off.values.tolist(), strict=True):
                share = value / base.gate(off.layer, off.part)
                by_position[p] = max(by_position.get(p, 0.0), share)
    places = sorted(by_position)
    made.append(Curve(
        title=f"worst part by position ({name}), of what is accepted",
        along="position",
        labels=[str(p) for p in places],
        values=[by_position[p] for p in places],
        band=[1 / FACTOR] * len(places),
        gate=[1.0] * len(places),
    ))  # fmt: skip
    ratios = {
        each: max(
            (_share(judgement, off) for off in judgement.offs
             if len(off.values) and off.part not in (ITSELF, "selection", "experts")),
            default=0.0,
        )
        for each, judgement in numbers.judged.items()
    }  # fmt: skip
    made.append(Curve(
        title="worst part by composition, of what is accepted",
        along="composition",
        labels=list(ratios),
        values=list(ratios.values()),
        band=[1 / FACTOR] * len(ratios),
        gate=[1.0] * len(ratios),
    ))  # fmt: skip
    return made


def _share(judgement: Judgement, off: Off) -> float:
    """Of what is accepted, in the worst row or the median one."""
    medians = (found.value / found.accepted for found in judgement.medians(off))
    return max([ratio(judgement, off), *medians])
