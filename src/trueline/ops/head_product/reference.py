"""Head by head, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.weights.value import Weight, dense


def pack(weight: Weight | Tensor, linear: Any, steady: bool) -> Tensor:
    return dense(weight).double()


def run(x: Tensor, packed: Tensor, to: Tensor | None = None) -> Tensor:
    heads = [x[:, h].double() @ packed[h].T for h in range(len(packed))]
    y = torch.stack(heads, dim=1).to(x.dtype)
    return y if to is None else to.copy_(y)
