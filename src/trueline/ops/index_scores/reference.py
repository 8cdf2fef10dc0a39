"""One row, one key, one head at a time, in float64. Bytes are looked up and decoded here a second
time, from the description of each layout, without the view's addresses."""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.layout import IndexLayout
from trueline.ops.index_scores import IMPLEMENTATIONS
from trueline.ops.mla_decode import Tiling
from trueline.ops.sparse_rows import SparseRows, Table

capabilities = IMPLEMENTATIONS["reference"]

FORMATS = {"float32": "<f", "float16": "<e"}


def prepare(
    rows: SparseRows | Table, view: IndexView, tiling: Tiling, *, topk: int
) -> tuple[SparseRows, int]:
    assert not isinstance(rows, Table), "tables are for GPUs"
    return rows, topk


def run(q: Tensor, weights: Tensor, view: IndexView, prepared: tuple[SparseRows, int]) -> Tensor:
    rows, topk = prepared
    scored = [length for length in rows.lengths if length > topk]
    scores = torch.full((len(q), max(scored, default=0)), -math.inf, dtype=torch.float64)
    row = 0
    for each in rows.runs:
        lengths = [(each.first + i) // each.ratio for i in range(each.count)]
        keys = (
            read_keys(view, each.block_ids, lengths[-1]) if lengths[-1] > topk else torch.empty(0)
        )
        for length in lengths:
            heads = list(q[row].double())
            for s in range(length if length > topk else 0):
                dots = [float(head @ keys[s]) for head in heads]
                parts = zip(weights[row].tolist(), dots, strict=True)
                scores[row, s] = sum(weight * (dot if dot > 0 else 0.0) for weight, dot in parts)
            row += 1
    return scores


def read_keys(view: IndexView, block_ids: list[int], stop: int) -> Tensor:
    """Keys of positions 0..stop, float64 [stop, dim]."""
    layout, size = view.layout, view.layout.block_size
    keys = torch.empty(stop, layout.dim, dtype=torch.float64)
    blocks = [bytes(view.bytes[i * block : (i + 1) * block].tolist()) for i, block in
              ((i, layout.block_bytes) for i in block_ids)]  # fmt: skip
    for p in range(stop):
        key, scale = _token(blocks[p // size], p % size, layout)
        keys[p] = torch.tensor(_decode(key, layout.storage), dtype=torch.float64) * scale
    return keys


def _token(block: bytes, place: int, layout: IndexLayout) -> tuple[bytes, float]:
    """A key's bytes and its scale, cut out of its block."""
    tokens = layout.block_size
    scaled = layout.storage.startswith("e4m3")
    width = len(block) // tokens - (4 if scaled else 0)
    if layout.kind == "rows":
        row = block[place * len(block) // tokens : (place + 1) * len(block) // tokens]
        key, scale = row[:width], row[width:]
    else:
        keys, scales = block[: tokens * width], block[tokens * width :]
        scale = scales[4 * place : 4 * place + 4]
        if layout.kind == "planar":
            key = keys[place * width : (place + 1) * width]
        else:
            group = keys[place // 16 * 16 * width :][: 16 * width]
            pieces = [group[i * 256 : (i + 1) * 256] for i in range(width // 16)]
            key = b"".join(piece[place % 16 * 16 :][:16] for piece in pieces)
    return key, struct.unpack("<f", scale)[0] if scaled else 1.0


def _decode(key: bytes, storage: str) -> list[float]:
    if storage == "bfloat16":
        return [struct.unpack("<f", b"\0\0" + key[i : i + 2])[0] for i in range(0, len(key), 2)]
    if storage in FORMATS:
        return [number for (number,) in struct.iter_unpack(FORMATS[storage], key)]
    return [decode_fp8(byte, storage) for byte in key]


@cache
def decode_fp8(byte: int, storage: str) -> float:
    """Of a sign, four bits of exponent and three of fraction."""
    bias = 8 if storage == "e4m3fnuz" else 7
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if byte == 0x80 if bias == 8 else byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0 ** (-2 - bias)
    return sign * (8 + fraction) * 2.0 ** (exponent - bias - 3)
