"""A row, or several narrow ones, per program: read once, written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.rms_norm import IMPLEMENTATIONS
from trueline.ops.triton_utils import inverse_rms, weighted

capabilities = IMPLEMENTATIONS["triton"]

# Numbers of a program that has narrow rows, and of a thread.
NUMBERS = 1024
PER_THREAD = 8


@dataclass(frozen=True, slots=True)
class NormLaunch:
    rows: int
    warps: int


def launch(width: int) -> NormLaunch:
    block = power_of_two(width)
    rows = max(1, NUMBERS // block)
    return NormLaunch(rows, min(max(rows * block // (32 * PER_THREAD), 1), 16))


@kernel(do_not_specialize=["rows"])
def norm_rows(
    x, y, weight, total, out, eps, rows, inner, x_outer, x_inner, y_outer, y_inner,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.arange(0, BLOCK)
    within = (row < rows)[:, None] & (i < WIDTH)[None, :]
    outer, place = row // inner, row % inner
    scale = tl.load(weight + i, mask=i < WIDTH, other=0.0)
    at = (outer * x_outer + place * x_inner)[:, None] + i[None, :]
    given = tl.load(x + at, mask=within, other=0.0)
    numbers = given.to(tl.float32)
    to = row[:, None] * WIDTH + i[None, :]
    if SUM:
        at = (outer * y_outer + place * y_inner)[:, None] + i[None, :]
        numbers += tl.load(y + at, mask=within, other=0.0).to(tl.float32)
        both = numbers.to(given.dtype)
        tl.store(total + to, both, mask=within)
        numbers = both.to(tl.float32)
    unit = inverse_rms(tl.sum(numbers * numbers, axis=1), eps, WIDTH)
    tl.store(out + to, weighted(numbers * unit[:, None], scale[None, :], given.dtype), mask=within)


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _go(x, x, weight, out, out, eps, False)
    return out


def run_sum(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(h, memory_format=torch.contiguous_format)
    out = torch.empty_like(total)
    _go(h, y, weight, total, out, eps, True)
    return total, out


def _go(
    x: Tensor, y: Tensor, weight: Tensor, total: Tensor, out: Tensor, eps: float, add: bool
) -> None:
    width = x.shape[-1]
    x, y = _planes(x), _planes(y)
    rows, chosen = x.shape[0] * x.shape[1], launch(width)
    norm_rows[(-(-rows // chosen.rows),)](
        *(x, y, weight, total, out, eps, rows, x.shape[1]),
        *(*x.stride()[:2], *y.stride()[:2]),
        WIDTH=width, BLOCK=power_of_two(width), ROWS=chosen.rows, SUM=add, num_warps=chosen.warps,
    )  # fmt: skip


def _planes(x: Tensor) -> Tensor:
    """Three dims, so that the heads of a wider projection need no copy."""
    x = unit_stride(x)
    if x.ndim < 3:
        return x.reshape(-1, 1, x.shape[-1])
    return x if x.ndim == 3 else x.flatten(0, -3)
