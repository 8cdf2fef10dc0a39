"""The weight as it is stored, for any GPU: codes are dequantised in the kernel's registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trueline.ops.codes import Codes, codes_of
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.linear import IMPLEMENTATIONS
from trueline.ops.linear.quantised_kernels import product
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["triton_quantised"]


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    columns: int = 64
    inner: int = 64
    """Bytes of a row of the weight that are loaded together."""
    warps: int = 4
    stages: int = 3


def launch(count: int) -> Tiles:
    return Tiles(min(max(power_of_two(count), 16), 64))


def pack(weight: Weight | Tensor) -> Codes:
    assert isinstance(weight, Weight), "the plan chose it for a quantised format"
    return codes_of(weight)


def run(x: Tensor, packed: Codes) -> Tensor:
    return run_with(launch(len(x)), x, packed, x.dtype)


def run_wide(x: Tensor, packed: Codes) -> Tensor:
    return run_with(launch(len(x)), x, packed, torch.float32)


def run_with(how: Tiles, x: Tensor, packed: Codes, dtype: torch.dtype) -> Tensor:
    x, width = unit_stride(x), packed.numbers.shape[1]
    out = x.new_empty(len(x), width, dtype=dtype)
    product[(triton.cdiv(width, how.columns), triton.cdiv(len(x), how.rows))](
        *(x, x.stride(0), packed.numbers, packed.numbers.shape[2], packed.scales),
        *(packed.scales.shape[2], out, len(x), packed.columns, width),
        SWAP=how.rows < 64, FORM=packed.form, ROWS=packed.rows_per_scale, GROUP=packed.group,
        BLOCK_M=how.rows, BLOCK_N=how.columns, BLOCK_K=how.inner,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return out
