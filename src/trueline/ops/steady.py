"""Elementwise functions whose bits do not depend on an element's neighbours.

torch's kernels run vectors and leave the last few elements of a run to scalar code, whose exp
differs in the last bit; and they cut large tensors between threads at arbitrary places. So: rows
that do not touch each other in memory form runs of their own, and pieces stay below the size that
is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# torch splits elementwise work between threads from this many elements on.
GRAIN = 32768


def apart(x: Tensor) -> Tensor:
    """A copy of x whose rows (last dim) do not touch."""
    copy = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., :-1]
    return copy.copy_(x)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x [n, width] with rows apart."""
    rows = max((GRAIN - 1) // max(x.shape[-1], 1), 1)
    if len(x) <= rows:
        return function(x)
    return torch.cat([function(x[i : i + rows]) for i in range(0, len(x), rows)])


def silu(x: Tensor) -> Tensor:
    """x [n, width]; rows apart already, as halves of a wider product are."""
    x = apart(x) if x.is_contiguous() and len(x) > 1 else x
    return by_rows(torch.nn.functional.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    return by_rows(torch.sigmoid, apart(x))


def exp(x: Tensor) -> Tensor:
    """Of any shape; the last dim makes the rows."""
    return by_rows(torch.exp, apart(x.reshape(-1, x.shape[-1]))).view(x.shape)


def log(x: Tensor) -> Tensor:
    return by_rows(torch.log, apart(x.reshape(-1, x.shape[-1]))).view(x.shape)
