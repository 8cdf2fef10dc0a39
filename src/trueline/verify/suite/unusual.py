"""Weights unlike those of the same place in other layers: what a damaged or mis-converted
checkpoint may show. Nothing here fails, as no number says which weights a model was trained to."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median

import torch
from torch import Tensor

from trueline.weights.formats import Stored
from trueline.weights.ledger import Use
from trueline.weights.load import TORCH_DTYPES, Files

PLACES, WHOLE, RUN = 8, 1 << 15, 1 << 12
"""Rows that are looked at of a matrix; numbers up to which it is looked at whole; of one row."""
FEW = 4
"""Weights of one place: fewer do not say what is usual."""
APART = 2.0**7
"""As one term among its peers, either it or they are below the 8 binary digits of bfloat16."""
GAIN = 2.0**12
"""Of a matrix: how many times as large as its inputs its outputs are, about."""
LARGEST = float(torch.finfo(torch.float16).max)
"""What the smallest of the usual dtypes of a checkpoint can hold."""
SCALES_APART = 2.0**12
"""A scale is its block's largest number over that of the format."""


@dataclass(frozen=True)
class Looked:
    """At some of a weight's numbers."""

    use: Use
    rms: float
    largest: float
    constant: bool
    zero_places: int
    places: int
    finite: bool
    mark: bytes
    scales: tuple[float, float, float]
    """The smallest, the median, the largest; ones, where there are none."""

    @property
    def name(self) -> str:
        return self.use.tensor.name

    @property
    def is_matrix(self) -> bool:
        return len(self.use.piece.shape) > 1


def look(uses: Sequence[Use]) -> list[Looked]:
    """One weight at a time, whose pages are given back."""
    files, found = Files(), []
    for use in uses:
        if use.parameter.below is None and math.prod(use.piece.shape) > 0:  # others: ids of experts
            found.append(_look(files, use))
            files.release(use)
    return found


def _look(files: Files, use: Use) -> Looked:
    values = [files.view(tensor) for tensor in use.tensors]
    runs = [run.double().flatten() for run in _runs(use.format.open(use.tensors, values))]
    numbers = torch.cat(runs)
    finite = bool(numbers.isfinite().all())
    scales = _scales(use, values)
    return Looked(
        use=use,
        rms=float(numbers.square().mean().sqrt()),
        largest=float(numbers.abs().max()),
        constant=bool((numbers == numbers[0]).all()),
        zero_places=sum(not bool(run.any()) for run in runs),
        places=len(runs),
        finite=finite,
        mark=blake2b(numbers.numpy().tobytes(), digest_size=16).digest(),
        scales=scales,
    )


def _runs(stored: Stored) -> Iterator[Tensor]:
    """All numbers of a small weight; of others, parts of rows from the first to the last."""
    shape = stored.shape
    if len(shape) < 2 or math.prod(shape) <= WHOLE:
        numbers = stored.dequantise()
        yield from torch.split(numbers, 1) if len(shape) > 1 else (numbers,)
        return
    rows, width = math.prod(shape[:-1]), shape[-1]
    for place in range(PLACES):
        at, part = place * (rows - 1) // (PLACES - 1), stored
        for axis in reversed(range(len(shape) - 1)):
            at, index = divmod(at, shape[axis])
            part = part.cut(axis, index, index + 1)
        first = place * max(width - RUN, 0) // (PLACES - 1)
        yield part.cut(len(shape) - 1, first, min(first + RUN, width)).dequantise()


def _scales(use: Use, values: Sequence[Tensor]) -> tuple[float, float, float]:
    for tensor, value in zip(use.tensors[1:], values[1:], strict=True):
        if TORCH_DTYPES[tensor.dtype].is_floating_point and value.numel():
            flat = value.flatten()
            some = flat[:: -(-len(flat) // WHOLE)].float()
            return float(some.min()), float(some.median()), float(some.max())
    return 1.0, 1.0, 1.0


def unusual(found: Sequence[Looked]) -> list[str]:
    """In a sentence each, what is told of a weight by itself before what is told beside others."""
    told = {each.name: reason for each in found if (reason := _alone(each))}
    peers = defaultdict[str, list[Looked]](list)
    for each in found:
        if each.name not in told:
            peers[re.sub(r"\d+", "*", each.name)].append(each)
    for place, members in peers.items():
        told |= _beside(place, members)
    return [f"{name}: {reason}" for name, reason in told.items()]


def _alone(one: Looked) -> str | None:
    low, middle, high = one.scales
    kind = one.use.parameter.kind
    if not one.finite:
        return "NaN or infinity"
    if low <= 0 or not math.isfinite(low + high):
        return f"scales from {low:.3g} to {high:.3g}: a scale is above 0"
    if high > middle * SCALES_APART:
        return f"scales of {middle:.3g} (the median) and of {high:.3g}"
    if one.largest == 0 and (one.is_matrix or kind == "norm"):
        return f"nothing but zeros, {_where(one)}"
    if one.is_matrix and one.constant:
        return f"nothing but {one.largest:.3g}, {_where(one)}"
    if one.largest > LARGEST:
        return f"numbers up to {one.largest:.3g}"
    if kind == "matrix" and (gain := one.rms * one.use.piece.shape[-1] ** 0.5) > GAIN:
        return f"outputs would be about {gain:.3g} times as large as inputs"
    if kind not in ("embedding", "head") and 2 * one.zero_places > one.places > 1:
        return f"zeros alone in {one.zero_places} of {one.places} rows that were looked at"
    return None


def _where(one: Looked) -> str:
    whole = math.prod(one.use.piece.shape) <= WHOLE or not one.is_matrix
    return "all of it" if whole else f"in {one.places} rows that were looked at"


def _beside(place: str, members: Sequence[Looked]) -> dict[str, str]:
    """Of weights whose names differ in their numbers alone: layer, expert."""
    told: dict[str, str] = {}
    first: dict[bytes, str] = {}
    for each in members:
        twin = each.name if each.constant else first.setdefault(each.mark, each.name)
        if twin != each.name:
            told[each.name] = f"the same numbers as {twin}"
    sizes = [each.rms for each in members if each.rms > 0]
    if len(sizes) < FEW:
        return told
    usual = median(sizes)
    for each in members:
        if each.rms > 0 and not 1 / APART < each.rms / usual < APART:
            told.setdefault(
                each.name, f"root mean square {each.rms:.3g}, where {place} has {usual:.3g}"
            )
    return told
