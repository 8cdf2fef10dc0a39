"""How far float32 may be from the exact numbers: from arithmetic, never from what a machine showed.

A rounding moves a number by at most `unit`, with a standard deviation of unit / √3. Roundings of
a sum's partial results add up like a random walk, whatever the order of the sum; adding one term
after the other is the worst order. `SURE` standard deviations of that order are accepted. Sums of
16-bit products may be tensor cores', which cut digits off instead of rounding: always towards
zero, once every 16 terms, so those errors add up one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.verify.failed import CheckFailed

SURE = 6.0
GROUP = 16
"""Products that a tensor core adds before it cuts."""
AROUND = 4.0
"""Roundings beside a sum: a scale, a maximum taken off, exp, the result."""
FP8_MMA = 2.0**-12
"""Tensor cores of Hopper GPUs add products of fp8 numbers with 13 digits after the first of the
largest, and round none: what they lose, of the sum of absolute products."""


def unit(dtype: torch.dtype = torch.float32) -> float:
    return torch.finfo(dtype).eps / 2


def rounding(count: float, dtype: torch.dtype = torch.float32) -> float:
    """Of so many roundings, relative to what is rounded."""
    return count * unit(dtype)


def narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def sum_bound(terms: float) -> float:
    """Of a sum of terms with one sign, relative to it: partial sums grow like k / n."""
    return SURE * unit() * math.sqrt(terms / 3 / 3)


def chain_bound(factors: float) -> float:
    """Of a product of so many factors, relative to it."""
    return SURE * unit() * math.sqrt(factors / 3)


def norm_bound(width: int) -> float:
    """Of a row over its root mean square, relative to it: half of the sum's error, and what is
    around it."""
    return sum_bound(width) / 2 + rounding(AROUND)


def dot_bound(terms: float, size: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of sums of so many products of `dtype`, whose signs differ. `size` is the root of the sum of
    a sum's squared products: about as large are its partial sums, taken for so large from the first
    on, since a walk may go far out before it comes back."""
    if narrow(dtype):
        return 4 * unit() * (terms / GROUP + AROUND) * size
    return SURE * unit() * math.sqrt((terms + 1) / 3) * size


def scattered(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Of a sum whose terms were each rounded to `dtype` first; nothing where that is float32, in
    which terms are made. `size` as in `dot_bound`."""
    return size * (SURE * unit(dtype) / math.sqrt(3) if narrow(dtype) else 0.0)


def gemm(
    x: Tensor, weight: Tensor, dtype: torch.dtype, rounded: torch.dtype = torch.float32
) -> Tensor:
    """Of x [..., in] times weight [out, in]; `rounded`: what the weight's numbers may have been
    rounded to before."""
    size = (x.double().square() @ weight.double().square().mT).sqrt()
    return dot_bound(x.shape[-1], size, dtype) + scattered(size, rounded)


def stored(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Of a result that is rounded to `dtype` at the end; in float32 its sum has that rounding."""
    return exact.double().abs() * (unit(dtype) if narrow(dtype) else 0.0)


# -- what ops are made of --------------------------------------------------------------


def mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dtype: torch.dtype,
    rounded: torch.dtype = torch.float32,
    limit: float | None = None,
) -> Tensor:
    """Of down (silu(gate) · up), [n, out]: errors of the middle's channels are independent.
    `rounded` as in `gemm`; `limit` of gate and up."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    gate, up = (x @ gate_up.mT).chunk(2, dim=-1)
    off = gemm(x, gate_up, dtype, rounded)
    off_gate, off_up = (off + stored(x @ gate_up.mT, dtype)).chunk(2, dim=-1)
    middle, off_middle = gated(gate, up, off_gate, off_up, dtype, limit)
    passed = (off_middle.square() @ down.square().mT).sqrt()
    return passed + gemm(middle, down, dtype, rounded) + stored(middle @ down.mT, dtype)


def gated(
    gate: Tensor,
    up: Tensor,
    off_gate: Tensor,
    off_up: Tensor,
    dtype: torch.dtype,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(gate) · up, and how far it may be off."""
    if limit is not None:
        # what is surely beyond the limit is the limit
        off_gate = off_gate * (gate - off_gate <= limit)
        off_up = off_up * (up.abs() - off_up <= limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    middle = gate * gate.sigmoid() * up
    # the slope of silu is at most 1.1; exp loses as many units as its argument is large
    off = 1.1 * off_gate * up.abs() + gate.sigmoid() * gate.abs() * off_up
    off += rounding(AROUND) * (1 + gate.abs() * (-gate).sigmoid()) * middle.abs()
    return middle, off + stored(middle, dtype)


@dataclass(frozen=True)
class Attended:
    """What attention must give, and how far from it a row may be."""

    out: Tensor  # [n, heads, values]
    lse: Tensor  # [n, heads]
    out_bound: Tensor  # [n, heads], of a row's norm
    lse_bound: Tensor  # [n, heads]

    def __getitem__(self, rows: slice | Tensor) -> Attended:
        parts = (self.out, self.lse, self.out_bound, self.lse_bound)
        return Attended(*(part[rows] for part in parts))


def softmax(
    scores: Tensor,
    off_scores: Tensor,
    values: Tensor,
    off_values: Tensor | float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Of softmax(scores [h, s]) values [s, v] or [h, s, v]: the bounds of a row's norm and of its
    lse, [h]. A wrong score moves a row only as far as its value is from what all make together."""
    count = scores.shape[-1]
    if not count:
        none = torch.zeros(len(scores), dtype=torch.float64)
        return none, none
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = (weights[:, None] @ values)[:, 0]
    below = scores.amax(-1, keepdim=True) - scores
    off_weights = off_scores + rounding(AROUND) * (1 + scores.abs() + below)
    lengths, size = values.norm(dim=-1), out.norm(dim=-1)
    across = (out[:, None] @ values.mT)[:, 0]
    apart = (lengths.square() - 2 * across + size[:, None].square()).clamp_min(0).sqrt()
    # weights are rounded before they meet values
    cut = 4 * unit() * (count / GROUP + AROUND) + unit(dtype) if narrow(dtype) else 0.0
    summed = (weights * ((sum_bound(count) + cut) * lengths + off_values)).sum(-1)
    moved = (weights * off_weights * apart).sum(-1)
    off_lse = (weights * off_weights).sum(-1) + sum_bound(count)
    return (
        moved + summed + (sum_bound(count) + unit(dtype)) * size,
        off_lse + rounding(AROUND) * (1 + lse.abs()),
    )


# -- comparison ------------------------------------------------------------------------


def record(what: str, ratio: float) -> None:
    """Each comparison's error, as a part of what is accepted. `make test-cpus` listens here."""


def require_within(what: str, ours: Tensor, exact: Tensor, accepted: Tensor) -> None:
    """Per row, so that no large row hides a small one: the norm of its error is at most that of
    `accepted`, which is of the same shape, or has one number for a row."""
    if ours.shape != exact.shape:
        raise CheckFailed(f"{what}: shape {list(ours.shape)}, not {list(exact.shape)}")
    error = (ours.double() - exact.double()).norm(dim=-1)
    limit = accepted.double().norm(dim=-1)
    ratio = torch.where(error == 0, error, error / limit)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    record(what, worst)
    if not worst <= 1:  # for NaN too
        at = int(ratio.nan_to_num(math.inf, math.inf).argmax())
        off, allowed = float(error.flatten()[at]), float(limit.flatten()[at])
        raise CheckFailed(f"{what}: a row is off by {off:.2g}, accepted {allowed:.2g}")
