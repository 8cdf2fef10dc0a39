"""One number at a time: the nearest of all codes, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trueline.ops.index_scores.reference import decode_fp8
from trueline.ops.row_rounding import IMPLEMENTATIONS, INDEX_GROUP, KEY_GROUP

capabilities = IMPLEMENTATIONS["reference"]

E4M3 = tuple(decode_fp8(code, "e4m3fn") for code in range(127))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_FLOOR, E2M1_FLOOR = 1e-4, 6 * 2.0**-126


def key(rows: Tensor, *, rope: int) -> Tensor:
    made = []
    for row in rows.bfloat16().double().tolist():
        plain = len(row) - rope
        made.append([*_coded(row[:plain], KEY_GROUP, E4M3, E4M3_FLOOR), *row[plain:]])
    return torch.tensor(made, dtype=rows.dtype).view(rows.shape)


def index(rows: Tensor) -> Tensor:
    size = rows.shape[-1]
    made = []
    for row in rows.bfloat16().double().reshape(-1, size).tolist():
        sums = [
            sum(-x if (i & j).bit_count() % 2 else x for i, x in enumerate(row))
            for j in range(size)
        ]
        turned = torch.tensor(sums, dtype=torch.float64) / math.sqrt(size)
        made.append(list(_coded(turned.bfloat16().tolist(), INDEX_GROUP, E2M1, E2M1_FLOOR)))
    return torch.tensor(made, dtype=rows.dtype).view(rows.shape)


def _coded(
    numbers: Sequence[float], group: int, codes: Sequence[float], floor: float
) -> Iterator[float]:
    for first in range(0, len(numbers), group):
        some = numbers[first : first + group]
        amax = max(abs(x) for x in some)
        if not all(math.isfinite(x) for x in some):
            yield from [math.nan] * len(some)
            continue
        scale = 2.0 ** math.ceil(math.log2(max(amax, floor) / codes[-1]))
        yield from (math.copysign(_nearest(abs(x) / scale, codes) * scale, x) for x in some)


def _nearest(x: float, codes: Sequence[float]) -> float:
    """Of two, the one with the even code."""
    return codes[min(range(len(codes)), key=lambda code: (abs(codes[code] - x), code % 2))]
