"""A few rows stream the weights through registers, in a kernel that loads them before
its PDL wait; more rows are cuBLAS's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.linear import IMPLEMENTATIONS, cublas
from trueline.ops.linear.cublas import pack, run_wide
from trueline.ops.linear.kernels import stream

__all__ = ["capabilities", "launch", "pack", "run", "run_wide", "streamed"]

capabilities = IMPLEMENTATIONS["triton"]

FEW_ROWS = 4
# A longer row of the weight would leave a program one row at a time.
LONGEST = 8192
# Bytes of a program's weights: several programs share a multiprocessor.
TILE_BYTES = 16 << 10
WARPS = 4


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    columns: int
    """Rows of the weight that a program holds."""
    inner: int
    warps: int = WARPS


def launch(heads: int, width: int, depth: int, itemsize: int, sms: int) -> LinearLaunch:
    """As many as fit, but with two programs for every multiprocessor."""
    inner = power_of_two(depth)
    columns = max(TILE_BYTES // (inner * itemsize), 1)
    while columns > WARPS and heads * -(-width // columns) < 2 * sms:
        columns //= 2
    return LinearLaunch(columns, inner)


def run(x: Tensor, packed: Tensor) -> Tensor:
    if len(x) > FEW_ROWS or x.shape[1] > LONGEST:
        return cublas.run(x, packed)
    out = x.new_empty(len(x), len(packed))
    streamed(x[:, None], packed[None], out[:, None])
    return out


def streamed(x: Tensor, weight: Tensor, out: Tensor, how: LinearLaunch | None = None) -> None:
    """x [n, heads, in], weight [heads, out, in] -> out [n, heads, out], for n up to FEW_ROWS."""
    x = unit_stride(x)
    heads, width, depth = weight.shape
    how = how or launch(heads, width, depth, weight.itemsize, num_sms(x.device))
    stream[(-(-width // how.columns), heads)](
        *(x, *x.stride()[:2], weight, out, *out.stride()[:2], len(x), width, depth),
        ROWS=power_of_two(len(x)), BLOCK_N=how.columns, BLOCK_K=how.inner, num_warps=how.warps,
    )  # fmt: skip
