"""Elementwise functions whose bits do not depend on an element's neighbours: on rows before or
after it, or on how wide a row is.

torch's kernels run vectors and leave the last few elements of a run to scalar code, whose exp
differs in the last bit; and they cut large tensors between threads at arbitrary places. So: rows
are filled up to whole vectors, and pieces stay below the size that is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

# torch splits elementwise work between threads from this many elements on.
GRAIN = 32768
# A multiple of what any of its kernels takes at a time.
RUN = 64


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x [n, width]."""
    missing = -x.shape[-1] % RUN
    full = pad(x, (0, missing)) if missing else x if x.stride(-1) == 1 else x.contiguous()
    rows = max((GRAIN - 1) // max(full.shape[-1], 1), 1)
    pieces = [function(full[i : i + rows]) for i in range(0, max(len(x), 1), rows)]
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return y[..., : x.shape[-1]].contiguous()


def silu(x: Tensor) -> Tensor:
    """x [n, width]."""
    return by_rows(torch.nn.functional.silu, x)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) × up, as the op mlp clamps them."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


def sigmoid(x: Tensor) -> Tensor:
    return by_rows(torch.sigmoid, x)


def exp(x: Tensor) -> Tensor:
    """Of any shape; the last dim makes the rows."""
    return by_rows(torch.exp, x.reshape(-1, x.shape[-1])).view(x.shape)


def log(x: Tensor) -> Tensor:
    return by_rows(torch.log, x.reshape(-1, x.shape[-1])).view(x.shape)


def sqrtsoftplus(x: Tensor) -> Tensor:
    """√ log(1 + eˣ). Far below zero that is e^(x / 2), which float32 has where it has no eˣ."""
    soft = x.clamp(min=0) + by_rows(torch.log1p, exp(-x.abs()))
    return torch.where(x < -17, exp(x / 2), soft.sqrt())
