"""What lies in a latent cache, in float64: rows are encoded and decoded here a second time, from
their description (`LatentFp8`), without the view's addresses."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from trueline.cache.layout import AMAX_FLOOR, LatentFp8
from trueline.cache.store import LatentView
from trueline.ops.index_scores.reference import decode_fp8

KEYS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored_rows(view: LatentView, cells: Tensor | Sequence[int]) -> Tensor:
    """[n, latent + rope] of cells [n]; an fp8 latent as code × scale, rounded once to the dtype of
    computation."""
    layout, rows = view.layout, view.rows[cells]
    if layout.fp8 is None:
        return rows.double()
    codes, scales, keys = _cut(rows, layout.latent, layout.rope, layout.fp8)
    dtype = KEYS[layout.fp8.rope]
    values = _codes(layout.fp8.storage)
    group = torch.arange(layout.latent) // layout.fp8.group
    latent = values.to(rows.device)[codes.long()] * scales.double()[:, group.to(rows.device)]
    return torch.cat((latent.to(dtype).double(), keys.double()), dim=1)


def _cut(rows: Tensor, latent: int, rope: int, fp8: LatentFp8) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, then scales from the next multiple of 4 on, then keys."""
    first = latent + -latent % 4
    last = first + 4 * math.ceil(latent / fp8.group)
    dtype = KEYS[fp8.rope]
    keys = rows[:, last : last + rope * dtype.itemsize].contiguous().view(dtype)
    return rows[:, :latent], rows[:, first:last].contiguous().view(torch.float32), keys


def _codes(storage: str) -> Tensor:
    """The number that each of the 256 codes stands for."""
    values = [decode_fp8(code, storage) for code in range(256)]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def store_row(view: LatentView, cell: int, latent: Tensor, key: Tensor) -> None:
    """One row, whose numbers are rounded to the dtype of computation first."""
    layout, row = view.layout, torch.cat((latent, key)).to(view.dtype)
    if layout.fp8 is None:
        view.rows[cell] = row
        return
    wide = row[: layout.latent].double()
    made = bytearray()
    scales = bytearray()
    for first in range(0, layout.latent, layout.fp8.group):
        codes, scale = _quantised(wide[first : first + layout.fp8.group], layout.fp8)
        made += codes
        scales += struct.pack("<f", scale)
    made += bytes(-layout.latent % 4) + scales
    made += row[layout.latent :].cpu().view(torch.uint8).numpy().tobytes()
    made += bytes(-len(made) % 4)
    view.rows[cell] = torch.tensor(list(made), dtype=torch.uint8, device=view.rows.device)


def _quantised(group: Tensor, fp8: LatentFp8) -> tuple[bytes, float]:
    """Codes and scale of a group: the nearest code by trying all, of two the even one."""
    values = _codes(fp8.storage)[:128]
    values = values[~values.isnan()]
    amax = float(group.abs().max())
    if not math.isfinite(amax):
        nan = 0x80 if fp8.storage == "e4m3fnuz" else 0x7F
        return bytes([nan] * len(group)), math.nan
    scale = _single(max(amax, _single(AMAX_FLOOR)) / float(values.max()))
    if fp8.power_of_two:
        scale = 2.0 ** math.ceil(math.log2(scale))
    codes = []
    for x in group.tolist():
        off = (values - abs(_single(x / scale))).abs()
        nearest = [int(code) for code in (off == off.min()).nonzero()]
        code = min(nearest, key=lambda code: code % 2)
        negative = math.copysign(1.0, x) < 0 and (code > 0 or fp8.storage == "e4m3fn")
        codes.append(code + 128 * negative)
    return bytes(codes), scale


def _single(x: float) -> float:
    """Rounded to float32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded
