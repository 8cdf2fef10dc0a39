"""Lists of blocks as a tensor. On the host, once a step: what it takes grows with the context."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

CODES = {torch.int32: "i", torch.long: "q"}


def padded(
    tables: Sequence[list[int]], dtype: torch.dtype = torch.long, *, least: int = 0
) -> Tensor:
    """[tables, most], at least so wide; the null block after a table's last. Through an array:
    `torch.tensor` takes four times as long for lists."""
    most = max((least, *map(len, tables)))
    numbers = array(CODES[dtype])
    for table in tables:
        numbers.extend(table)
        numbers.extend(repeat(0, most - len(table)))
    if not numbers:
        return torch.empty(len(tables), most, dtype=dtype, device="cpu")
    return torch.frombuffer(numbers, dtype=dtype).view(len(tables), most)
