"""oneDNN with weights packed for it: memory-bound at few rows, and on the CPUs seen so far the
bits of a row do not depend on how many rows there are (the plan checks it before relying on it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What the packing optimises for; small counts run well in it too.
ROWS_HINT = 128
# One to three rows run slower than four.
FEWEST_ROWS = 4


def pack(weight: Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


def run(x: Tensor, packed: Any) -> Tensor:
    count = x.shape[0]
    if count < FEWEST_ROWS:
        x = torch.cat((x, *[x[:1]] * (FEWEST_ROWS - count)))  # cheaper than padding
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return out[:count]
    full: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, None, "none", [], "")
    return full


def refusals(dtype: torch.dtype, batch_invariant: bool) -> list[str]:
    """Why it cannot run here; empty if it can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ["this PyTorch has no oneDNN"]
    try:
        probe = torch.ones(5, 8, dtype=dtype)
        got = run(probe, pack(torch.ones(16, 8, dtype=dtype)))
    except (RuntimeError, AttributeError) as error:
        return [f"oneDNN's packed product does not run here: {str(error).splitlines()[0]}"]
    return [] if bool((got == 8).all()) else ["oneDNN's packed product gave wrong numbers"]
