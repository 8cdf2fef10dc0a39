"""What caches round, by its definition: of exact numbers, and of numbers that are known up to an
error. Where that error spans the middle between two codes, either is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.layout import AMAX_FLOOR, LatentLayout
from trueline.reference import published
from trueline.reference.functional import FLOOR, LARGEST, power_of_two_above
from trueline.verify import bounds
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Nearest = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Code:
    """Groups of `size` channels with a power of two each for a scale."""

    size: int
    largest: float
    floor: float
    nearest: Nearest


def fp4_rounding(_: Subject) -> None:
    fp4_is_nearest()


def fp4_is_nearest() -> None:
    """Half-way between two numbers of fp4, just below and just above, either sign: the nearest, and
    of two the one with an even code."""
    middles = [(a + b) / 2 for a, b in pairwise(CODES)]
    sizes = [x * (1 + by * 2.0**-20) for x in (*middles, *CODES[1:-1]) for by in (-1, 0, 1)]
    for scale in (2.0**-9, 1.0, 2.0**7):
        for x in sizes:
            wanted = min(CODES, key=lambda c: (abs(x - c), CODES.index(c) % 2)) * scale
            # the first keeps the group's scale
            given = torch.tensor([CODES[-1], x, -x], dtype=torch.float64) * scale
            found = published.through_e2m1(given)[1:].tolist()
            if found != [wanted, -wanted]:
                raise CheckFailed(f"fp4 rounding: {x * scale} to {found[0]}, expected {wanted}")


def keys_of(held: Tensor, exact: Tensor, off: Tensor, rope: int) -> Tensor:
    """Which rows `held` [n, d] are what a window or an entry keeps of numbers no farther from
    `exact` than `off` [n, 1]."""
    low, high = (_short(exact + by) for by in (-off, off))
    plain = held.shape[1] - rope
    same = _between(held[:, plain:], low[:, plain:], high[:, plain:], _short)
    code = Code(published.KEY_GROUP, LARGEST, FLOOR, _e4m3)
    return same.all(1) & _coded(held[:, :plain], low[:, :plain], high[:, :plain], code)


def index_rows_of(held: Tensor, exact: Tensor, off: Tensor) -> Tensor:
    """The same of index rows."""
    low, high = (_short(exact + by) for by in (-off, off))
    size = held.shape[1]
    matrix = published.hadamard(size).to(exact.dtype)
    middle, apart = (low + high) / 2 @ matrix, ((high - low) / 2).sum(1, keepdim=True)
    apart = apart + bounds.dot_bound(size, low.norm(dim=1, keepdim=True))
    low, high = (_short((middle + by) / size**0.5) for by in (-apart, apart))
    largest, floor = published.LARGEST_E2M1, published.FLOOR_E2M1
    code = Code(published.INDEX_GROUP, largest, floor, published.nearest_e2m1)
    return _coded(held, low, high, code)


def fp8_rows_of(held: Tensor, exact: Tensor, off: Tensor, layout: LatentLayout) -> Tensor:
    """The same of rows of a cache in fp8: codes of the latent's groups, and the rotated key as it
    is."""
    fp8, width = layout.fp8, layout.latent
    assert fp8 is not None
    found = ((held[:, width:] - exact[:, width:]).abs() <= off).all(1)
    dtype = DTYPES[fp8.storage]
    for start in range(0, width, fp8.group):
        at = slice(start, min(start + fp8.group, width))
        mine, size = held[:, at], exact[:, at].abs().amax(1, keepdim=True)
        fits = torch.zeros_like(found)
        for amax in (size - off, size, size + off):
            scale = amax.clamp_min(AMAX_FLOOR) / fp8.variant.largest
            if fp8.power_of_two:
                scale = power_of_two_above(scale)
            # a scale that is no power of two is as uncertain as what it comes from
            loose = 0.0 if fp8.power_of_two else off / size.clamp_min(AMAX_FLOOR)
            by = off + 2 * loose * exact[:, at].abs()
            low, high = (_to(dtype, (exact[:, at] + way * by) / scale) for way in (-1, 1))
            slack = 2 * loose * mine.abs() / scale
            fits |= ((low - slack <= mine / scale) & (mine / scale <= high + slack)).all(1)
        found &= fits
    return found


def _to(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _short(x: Tensor) -> Tensor:
    return _to(torch.bfloat16, x)


def _e4m3(x: Tensor) -> Tensor:
    return _to(torch.float8_e4m3fn, x)


def _coded(held: Tensor, low: Tensor, high: Tensor, code: Code) -> Tensor:
    """Which rows are codes × scales of numbers between low and high. A group's scale is that of its
    smallest largest number, or of its largest."""
    found = torch.ones(len(held), dtype=torch.bool)
    split = (torch.split(x, code.size, dim=1) for x in (held, low, high))
    for mine, below, above in zip(*split, strict=True):
        crosses = (below < 0) & (above > 0)
        least = torch.minimum(below.abs(), above.abs()).masked_fill(crosses, 0.0)
        most = torch.maximum(below.abs(), above.abs())
        fits = torch.zeros_like(found)
        for sizes in (least, most):
            amax = sizes.amax(1, keepdim=True).clamp_min(code.floor)
            scale = power_of_two_above(amax / code.largest)
            fits |= _between(mine / scale, below / scale, above / scale, code.nearest).all(1)
        found &= fits
    return found


def _between(held: Tensor, low: Tensor, high: Tensor, nearest: Nearest) -> Tensor:
    """Which numbers are nearest to some number between low and high: nearest never falls."""
    return (nearest(low) <= held) & (held <= nearest(high)) & (nearest(held) == held)
