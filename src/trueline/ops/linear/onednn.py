"""oneDNN with weights packed for it: memory-bound at few rows, and on the CPUs seen so far the
bits of a row do not depend on how many rows there are (the plan checks it before relying on it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.ops.capabilities import Context
from trueline.ops.linear import IMPLEMENTATIONS
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["onednn"]

# What the packing optimises for; small counts run well in it too.
ROWS_HINT = 128
# One to three rows run slower than four.
FEWEST_ROWS = 4
# The bits of a single column are its own.
FEWEST_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Packed:
    weight: object
    columns: int


def pack(weight: Weight | Tensor) -> Packed:
    weight = dense(weight)
    columns = len(weight)
    if columns < FEWEST_COLUMNS:
        weight = pad(weight, (0, 0, 0, FEWEST_COLUMNS - columns))
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT), columns)


def run(x: Tensor, packed: Packed) -> Tensor:
    count = x.shape[0]
    if count < FEWEST_ROWS:
        x = torch.cat((x, *[x[:1]] * (FEWEST_ROWS - count)))  # cheaper than padding
    y: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), packed.weight, None, "none", [], ""
    )
    return y[:count, : packed.columns]


def run_wide(x: Tensor, packed: Packed) -> Tensor:
    return run(x, packed).float()


def refusals(context: Context) -> list[str]:
    """Why it cannot run here; empty if it can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ["this PyTorch has no oneDNN"]
    try:
        probe = torch.ones(5, 8, dtype=context.dtype)
        got = run(probe, pack(torch.ones(16, 8, dtype=context.dtype)))
    except (RuntimeError, AttributeError) as error:
        return [f"oneDNN's packed GEMM does not run here: {str(error).splitlines()[0]}"]
    return [] if bool((got == 8).all()) else ["oneDNN's packed GEMM gave wrong numbers"]
