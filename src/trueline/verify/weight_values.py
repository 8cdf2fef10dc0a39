"""Weights stay exact however they are cut and concatenated, wherever their blocks end."""

from __future__ import annotations

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
    """Every quantised matrix, cut inside of blocks along each axis and concatenated in another
    order, has the numbers of the reference's own reading."""
    config = second_opinion.read_config(subject.model)
    theirs = load_reference_weights(subject.model, config, torch.float32)
    stored = StoredWeights(subject.model, read_model(subject.model), dtype=torch.float32)
    seen = 0
    for name in list(stored):
        weight = stored.pop(name)
        if weight.format != DENSE.label and name in theirs:
            seen += 1
            for axis in range(2):
                _compare(name, weight, theirs[name].float(), axis)
    if not seen:
        raise CheckFailed("weight values: no quantised matrix was compared")


def _compare(name: str, weight: Weight, exact: Tensor, axis: int) -> None:
    total = weight.shape[axis]
    edges = [0, total // 3 + 1, total // 3 + 2, 2 * total // 3 + 1, total]
    spans = [Span(start, stop, total) for start, stop in pairwise(edges)]
    cuts = [weight.cut(axis, span) for span in spans]
    wanted = [exact.narrow(axis, span.start, span.count) for span in spans]
    for span, ours, right in zip(spans, cuts, wanted, strict=True):
        _same(f"{name}: {span} of axis {axis}", ours, right)
    reversed_order = Weight.concat(cuts[::-1], axis), torch.cat(wanted[::-1], axis)
    _same(f"{name}: cuts of axis {axis} in another order", *reversed_order)


def _same(what: str, ours: Weight, exact: Tensor) -> None:
    if not torch.equal(ours.dequantise(), exact):
        raise CheckFailed(f"weight values: {what}: not the reference's numbers")
