"""Where NaN or infinity comes up first in an engine that has stopped over them."""

from __future__ import annotations

import math

from trueline.reference import ENDS
from trueline.reference.model import FEED, MIX
from trueline.verify.report import Place
from trueline.verify.suite.definition import EXACT, Definition, Part
from trueline.verify.suite.observe import Observed
from trueline.verify.suite.outcome import Wrong
from trueline.verify.suite.sequences import PART_OF

SHOWN_WEIGHTS = 3


class NotFinite(Wrong):
    """What the engine said, and the part that was the first to give such numbers."""

    def __init__(self, place: Place, told: str) -> None:
        super().__init__(f"{place}: NaN or infinity; {told}", place, [])
        self.first, self.told = place, told


def first_not_finite(composition: str, requests: list[Observed]) -> Place | None:
    """By layer, by the order within a layer; None where all that was seen are numbers."""
    layers = sorted({layer for request in requests for layer, _ in request.inputs})
    for layer in layers:
        for half in (MIX, FEED):
            for outputs in (False, True):
                for number, request in enumerate(requests):
                    rows = (request.outputs if outputs else request.inputs).get((layer, half), {})
                    bad = [p for p in sorted(rows) if not bool(rows[p].isfinite().all())]
                    if bad:
                        return Place(
                            layer=layer,
                            part=PART_OF[half] if outputs else "entry",
                            composition=composition,
                            request=number,
                            position=bad[0],
                            path=request.paths.get(bad[0]),
                        )
    return None


def of_weights(definition: Definition, place: Place) -> str:
    """What the checkpoint has there: such an engine may be right."""
    at_start = place.layer is None or (place.layer == 0 and place.part == "entry")
    part: Part = ENDS if at_start or place.layer is None else place.layer
    largest = {
        name: float(tensor.abs().max())
        for name, tensor in definition.part(part, EXACT).params.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    found = [name for name, size in largest.items() if not math.isfinite(size)]
    if not found:
        name = max(largest, key=lambda name: largest[name])
        return f"the weights there are finite, the largest {largest[name]:.3g} in {name}"
    more = f" and {len(found) - SHOWN_WEIGHTS} more" if len(found) > SHOWN_WEIGHTS else ""
    return f"the checkpoint has such numbers in {', '.join(found[:SHOWN_WEIGHTS])}{more}"
