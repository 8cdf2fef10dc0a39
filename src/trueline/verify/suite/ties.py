"""Numerics that round what they multiply. Where a number is as near to the middle between two codes
as noise reaches, an engine may take the other one than the definition, and its row is off by a step
of that code. So a row that is off is held against the definition once more, with all that it rounds
moved by no more than noise: of a code that changes then either is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trueline.reference import functional, published
from trueline.reference.functional import GROUP, Params

ROUNDING = ("activations", "published")
STEPS = (2, 8, 32, 128)
"""Of the dtype of computation: how far a number may be off that is to be rounded, relative to its
row's root mean square. Codes near zero lie so close that the most would change too many at once."""
WAYS = 8
"""Up, down, and each number as it is drawn: a row has one such number mostly, and seldom more."""
DRAWS = len(STEPS) * WAYS


@contextmanager
def moved(draw: int, compute: torch.dtype) -> Iterator[None]:
    through_fp8, index_row = functional.through_fp8, published.index_row
    noise = STEPS[draw // WAYS] * torch.finfo(compute).eps

    def inputs(x: Tensor, powers_of_two: bool, size: int | None = None) -> Tensor:
        return through_fp8(_moved(x, draw, noise, size or GROUP), powers_of_two, size)

    def queries(params: Params, row: Tensor) -> Tensor:
        """Keys are those that are stored."""
        moving = row.dim() == 3
        return index_row(params, _moved(row, draw, noise, row.shape[-1]) if moving else row)

    functional.through_fp8, published.index_row = inputs, queries
    try:
        yield
    finally:
        functional.through_fp8, published.index_row = through_fp8, index_row


def _moved(x: Tensor, draw: int, noise: float, size: int) -> Tensor:
    """But for the largest number of each group, whose scale is not to move."""
    by = noise * x.square().mean(-1, keepdim=True).sqrt()
    if (way := draw % WAYS) < 2:
        by = by * x.sign() * (1 - 2 * way)
    else:
        generator = torch.Generator(x.device).manual_seed(draw)
        signs = torch.randint(2, x.shape, generator=generator, device=x.device) * 2 - 1
        by = by * signs
    groups = []
    for mine, change in zip(torch.split(x, size, -1), torch.split(by, size, -1), strict=True):
        most = mine.abs().amax(-1, keepdim=True)
        other = (mine + change).clamp(-most, most)
        groups.append(other.where(mine.abs() < most, mine))
    return torch.cat(groups, -1)
