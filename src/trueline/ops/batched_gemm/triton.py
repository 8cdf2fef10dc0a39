"""A few rows stream plain weights (ops/linear/triton.py); more are cuBLAS's. Block fp8 stays as it
is stored, and few rows are multiplied with its codes; for many it is dequantised before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trueline.device import converts_fp8
from trueline.ops.batched_gemm import IMPLEMENTATIONS, cublas
from trueline.ops.batched_gemm.quantised_kernels import dequantised, grouped_product
from trueline.ops.codes import Codes, codes_of, common_blocks
from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.linear import LinearOp
from trueline.ops.linear.triton import FEW_ROWS, LONGEST, streamed
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.value import Weight

__all__ = ["capabilities", "pack", "run"]

capabilities = IMPLEMENTATIONS["triton"]

SIDE = 128
"""Of a block that has one scale."""
MOST_ROWS = 256
"""That are multiplied with codes."""
ROW_TILES = 4
COLUMNS = {16: 32, 32: 32, 64: 64}
"""Of the width that a program has, by its rows. Its two warps have them alone, so that no code is
converted twice; more of them where rows would be read too often."""
MOST_PARTS = 8
PER_SM = {16: 8, 32: 8, 64: 4}
"""Programs that a multiprocessor runs at a time, by their rows."""
DENSE_ROWS = 32
"""That a program dequantises."""
CODES = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Packed:
    codes: Codes
    arrived: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes


@dataclass(frozen=True, slots=True)
class CodesLaunch:
    rows: int
    columns: int
    """Of the width."""
    parts: int
    """That the depth is split into."""
    stages: int


def launch(rows: int, heads: int, width: int, depth: int, sms: int) -> CodesLaunch:
    """As many programs as run at a time, if each has some blocks."""
    together = min(max(power_of_two(rows), 16), MOST_ROWS // ROW_TILES)
    columns = COLUMNS[together]
    tiles = triton.cdiv(width, columns) * heads * triton.cdiv(rows, together)
    parts = 1
    most = PER_SM[together] * sms
    while parts < MOST_PARTS and 2 * parts * tiles <= most and depth >= 8 * SIDE * parts:
        parts *= 2
    return CodesLaunch(together, columns, parts, 4 if together == 16 else 3)


def pack(weight: Weight | Tensor, linear: LinearOp, batch_invariant: bool) -> Tensor | Packed:
    if not isinstance(weight, Weight) or not _fits(weight):
        return cublas.pack(weight, linear, batch_invariant)
    codes, (heads, width, _) = codes_of(weight), weight.shape
    tiles = heads * triton.cdiv(width, min(COLUMNS.values())) * ROW_TILES
    return Packed(codes, torch.zeros(tiles, dtype=torch.int32, device=codes.numbers.device))


def _fits(weight: Weight) -> bool:
    """Whether its blocks, all of them whole, are those of the kernel."""
    _, width, depth = weight.shape
    if weight.format != BlockFp8.label or width % SIDE or depth % SIDE or not converts_fp8():
        return False
    _, group, rows = common_blocks(weight)
    return (rows, group) == (SIDE, SIDE)


def run(x: Tensor, packed: Tensor | Packed, to: Tensor | None = None) -> Tensor:
    if to is not None and to.stride(2) != 1:
        return to.copy_(run(x, packed))
    if isinstance(packed, Packed):
        return _run_codes(x, packed, to)
    if len(x) > FEW_ROWS or x.shape[2] > LONGEST:
        return cublas.run(x, packed, to)
    y = x.new_empty(len(x), *packed.shape[:2]) if to is None else to
    streamed(x, packed, y)
    return y


def _run_codes(x: Tensor, packed: Packed, to: Tensor | None) -> Tensor:
    numbers = packed.codes.numbers.view(CODES)
    (heads, width, depth), rows = numbers.shape, len(x)
    if rows > MOST_ROWS:
        return cublas.run(x, _dense(packed, x.dtype), to)
    x = unit_stride(x)
    how = launch(rows, heads, width, depth, num_sms(x.device))
    y = x.new_empty(rows, heads, width) if to is None else to
    parts = y
    if how.parts > 1:
        parts = x.new_empty(how.parts, rows, heads, width, dtype=torch.float32)
    if rows:
        grouped_product[
            (triton.cdiv(width, how.columns), heads * how.parts, triton.cdiv(rows, how.rows))
        ](
            *(x, *x.stride()[:2], numbers, packed.codes.scales, y, *y.stride()[:2]),
            *(parts, packed.arrived, rows, heads, width, depth),
            SPLIT=how.parts, SIDE=SIDE, BLOCK_M=how.rows, BLOCK_N=how.columns, STAGES=how.stages,
            num_warps=2,
        )  # fmt: skip
    return y


def _dense(packed: Packed, dtype: torch.dtype) -> Tensor:
    numbers = packed.codes.numbers.view(CODES)
    heads, width, depth = numbers.shape
    out = torch.empty(heads, width, depth, dtype=dtype, device=numbers.device)
    dequantised[(triton.cdiv(heads * width, DENSE_ROWS), triton.cdiv(depth, SIDE))](
        *(numbers, packed.codes.scales, out, heads * width, depth),
        SIDE=SIDE, ROWS=DENSE_ROWS, COLUMNS=SIDE, num_warps=4,
    )  # fmt: skip
    return out
