"""A program per row where a row fits one; else one per chunk of it, and again over what the chunks
have left. Of equal scores a chunk keeps the lowest positions, as the whole row does: nothing that
is chosen is lost on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.ops.launch import num_sms, power_of_two
from trueline.ops.topk import IMPLEMENTATIONS, kernels

capabilities = IMPLEMENTATIONS["triton"]

LARGEST = 16384
"""Scores that the registers of one program hold well."""
SMALLEST = 256
PART = 4096
"""Scores that are put in place together."""


@dataclass(frozen=True, slots=True)
class TopkLaunch:
    chunk: int
    part: int
    """Scores put in place at a time."""
    warps: int


def launch(rows: int, width: int, topk: int, sms: int) -> TopkLaunch:
    """A chunk leaves topk: it must hold at least twice as many for the next round to be shorter.
    More warps make one program faster, and leave room for fewer."""
    # few sizes: each is compiled once
    largest = max(LARGEST, 2 * power_of_two(topk))
    chunk = max(power_of_two(width), SMALLEST) if width <= PART else largest
    many = rows * -(-width // chunk) > 2 * sms
    return TopkLaunch(chunk, min(chunk, PART), 4 if chunk <= PART or many else 8)


def run(scores: Tensor, lengths: Tensor, topk: int, how: TopkLaunch | None = None) -> Tensor:
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    n, width = scores.shape
    out = lengths.new_empty(n, topk, dtype=torch.int64)
    if not out.numel():
        return out
    source, columns, padded = None, power_of_two(topk), _padded(scores)
    while True:
        use = how or launch(n, width, topk, num_sms(scores.device))
        chunks = max(-(-width // use.chunk), 1)
        final = chunks == 1
        left = out if final else lengths.new_empty(n, chunks, topk, dtype=torch.int32)
        kernels.select[(n, chunks)](
            *(scores, scores.stride(0), lengths, source, width, left, topk),
            PADDED=padded,
            CHUNK=use.chunk,
            PART=use.part,
            WIDTH=columns,
            FINAL=final,
            num_warps=use.warps,
        )
        if final:
            return out
        source, width = left, chunks * topk


def _padded(scores: Tensor) -> bool:
    """Whether every row lies at a multiple of four numbers and may be read up to one."""
    n, width = scores.shape
    start, stride = scores.storage_offset(), scores.stride(0)
    stop = start + (n - 1) * stride + -(-width // 4) * 4
    held = scores.untyped_storage().nbytes() // scores.itemsize
    return start % 4 == 0 and stride % 4 == 0 and stop <= held
