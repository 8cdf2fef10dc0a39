"""Weights stay exact however they are cut and concatenated, wherever their blocks end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from trueline.models import read_model
from trueline.reference import config as second_opinion
from trueline.reference.weights import load_weights as load_reference_weights
from trueline.spec.source import Span
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.weights.formats.dense import DENSE
from trueline.weights.load import StoredWeights
from trueline.weights.value import Weight


def weight_values(subject: Subject) -> None:
    """Every quantised matrix, those of experts one by one, cut inside of blocks and groups along
    each axis and concatenated in another order, has the numbers of the reference's own reading."""
    config = second_opinion.read_config(subject.model)
    theirs = load_reference_weights(subject.model, config, torch.float32)
    stored = StoredWeights(subject.model, read_model(subject.model), dtype=torch.float32)
    seen = 0
    for name in list(stored):
        for sources, weight in _matrices(name, stored.pop(name)):
            if weight.format != DENSE.label:
                seen += 1
                exact = torch.cat([theirs[source] for source in sources])
                require_same(sources[0], weight, exact)
    if not seen:
        raise CheckFailed("weight values: no quantised matrix was compared")


def _matrices(name: str, weight: Weight) -> Iterator[tuple[list[str], Weight]]:
    """With the published names of what each is made of."""
    stem, _, last = name.rpartition(".experts.")
    if not stem:
        yield [name], weight
        return
    projections = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
    for expert, matrix in enumerate(weight.unstack()):
        yield [f"{stem}.experts.{expert}.{part}.weight" for part in projections], matrix


def require_same(name: str, weight: Weight, exact: Tensor) -> None:
    """Whole, cut along each axis, cut twice, and put together in another order."""
    _same(name, weight, exact)
    for axis in range(2):
        total = weight.shape[axis]
        edges = sorted({0, total // 3 + 1, total // 3 + 2, 2 * total // 3 + 1, total})
        spans = [Span(start, stop, total) for start, stop in pairwise(edges)]
        cuts = [weight.cut(axis, span) for span in spans]
        wanted = [exact.narrow(axis, span.start, span.count) for span in spans]
        for span, ours, right in zip(spans, cuts, wanted, strict=True):
            _same(f"{name}: {span} of axis {axis}", ours, right)
            twice = Span(span.count // 2, span.count, span.count)
            of_it = right.narrow(axis, twice.start, twice.count)
            _same(f"{name}: {twice} of {span} of axis {axis}", ours.cut(axis, twice), of_it)
        reversed_order = Weight.concat(cuts[::-1], axis), torch.cat(wanted[::-1], axis)
        _same(f"{name}: cuts of axis {axis} in another order", *reversed_order)


def _same(what: str, ours: Weight, exact: Tensor) -> None:
    if not torch.equal(ours.dequantise(), exact):
        raise CheckFailed(f"weight values: {what}: not the reference's numbers")
