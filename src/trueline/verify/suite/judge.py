"""Each half of each layer against the definition, on the inputs that the engine itself gave it.

So an error stays where it is made: a wrong layer does not make those behind it look wrong, and no
near-tie decides, because choices are taken from the engine once they are found to be right. What is
accepted comes from the same run: what an independent evaluation in the model's dtype, on the same
inputs, is off the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trueline.reference import ENDS
from trueline.reference.model import FEED, MIX, Half
from trueline.verify.suite.definition import Definition, Part
from trueline.verify.suite.held import Rounded
from trueline.verify.suite.judgement import (
    BandOf,
    Judgement,
    Requests,
    kind_names,
    relative,
)
from trueline.verify.suite.noise import Noise, note_noise
from trueline.verify.suite.observe import Key, Observed
from trueline.verify.suite.sequences import RequestRows, Run


class Judge:
    """`baseline`: which composition's requests the noise is measured on (their sequences are
    evaluated twice more)."""

    def __init__(
        self,
        definition: Definition,
        compute: torch.dtype,
        *,
        key_noise: float = 0.0,
        rounded: Rounded | None = None,
    ) -> None:
        self.definition, self.compute, self.rounded = definition, compute, rounded
        self.key_noise = key_noise
        """Of index keys that are stored in fewer bits than they are computed in."""
        self.progress: Callable[[int, int], None] = lambda layer, count: None

    def sequence(self, request: Observed) -> RequestRows:
        return RequestRows(self, request)

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
            Noise(self, each.composition, i, request)
            for each in baseline
            for i, request in enumerate(each.observed)
        ]  # fmt: skip
        with torch.no_grad(), self.definition.there():
            runs = [
                Run(self, each.composition, i, request)
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
            run = Run(self, "", 0, request)
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
        limit: Mapping[BandOf, float] | None = None,
    ) -> tuple[Judgement, dict[str, Tensor]]:
        """One half of one layer alone, and what the definition has for each part of it. `residual`:
        before it, where its entry is to be judged; `shared`: keys that the layer before has
        chosen, where this one takes them; `limit`: up to which noise here widens `bands`, and up
        to which that of single rows counts; without one it widens nothing."""
        layer, half = key
        made = Judgement(bands=dict(bands.bands) if bands else {})
        with torch.no_grad(), self.definition.there():
            ref = self.definition.part(weights)
            made.kinds[layer] = kind_names(ref, layer)
            run, noise = Run(self, "", 0, request), Noise(self, "", 0, request)
            run.weights, run.limited = weights, limit is not None
            rough = self.definition.part(weights, self.compute) if limit is not None else ref
            if residual is not None:
                run.h = noise.h = residual
                noise.rough = residual.to(self.compute)
                if limit is not None:
                    noise.entry(layer, half, ref, rough, made)
                    made.limit(limit)
                run.entry(layer, half, ref, made)
            if request.outputs.get(key):
                run.shared = None if shared is None else shared.to(self.definition.device)
                if limit is not None:
                    noise.half(layer, half, ref, rough, made)
                    made.limit(limit)
                run.half(layer, half, ref, made)
        return made, run.exact

    def the_head(
        self,
        request: Observed,
        residual: Tensor,
        bands: Judgement,
        *,
        limit: Mapping[BandOf, float] | None = None,
    ) -> tuple[Judgement, dict[str, Tensor]]:
        made = Judgement(bands=dict(bands.bands))
        with torch.no_grad(), self.definition.there():
            ends = self.definition.part(ENDS)
            run = Run(self, "", 0, request)
            run.h = residual
            if limit is not None:
                ours = self.definition.part(ENDS, self.compute).head(residual.to(self.compute))
                note_noise(made, -1, "head", relative(ours, ends.head(residual)))
                made.limit(limit)
            run.head(ends, made)
        return made, {"head": made.logits["", 0]}
