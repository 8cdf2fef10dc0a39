"""Two kernels for a mix: a small GEMM with the sums of squares beside it, then everything else. One
for a merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trueline.ops.hyper_connections import IMPLEMENTATIONS, Mixed, kernels
from trueline.ops.launch import num_sms, power_of_two

capabilities = IMPLEMENTATIONS["triton"]

BLOCK_K = 64
BLOCK = 1024
"""Channels of a program, of all streams together."""
SPLITS = (32, 16, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class ProjectLaunch:
    rows: int
    splits: int
    depth: int
    """Channels of a split."""


def launch(tokens: int, width: int, sms: int) -> ProjectLaunch:
    """As many splits as leave a program some channels, and do not outnumber the multiprocessors."""
    rows = 16 if tokens <= 1024 else 64
    tiles = triton.cdiv(tokens, rows)
    most = max(width // (2 * BLOCK_K), 1)
    splits = next((n for n in SPLITS if n <= most and n * tiles <= sms), 1)
    depth = triton.cdiv(width, splits * BLOCK_K) * BLOCK_K
    return ProjectLaunch(rows, triton.cdiv(width, depth), depth)


def mix(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Mixed:
    n, streams, width = h.shape
    x = h.new_empty(n, width)
    post = h.new_empty(n, streams, dtype=torch.float32)
    carry = h.new_empty(n, streams, streams, dtype=torch.float32)
    _read(h, fn, base, scale, norm_eps, eps, x, (post, carry), iterations)
    return Mixed(x, post, carry)


def merge(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
    h, y = h.contiguous(), y.contiguous()
    n, streams, width = h.shape
    out = torch.empty_like(h)
    if n:
        kernels.merge[(n, triton.cdiv(width, _channels(streams)))](
            *(h, y, mixed.post, mixed.carry, out, width),
            STREAMS=streams,
            PADDED=power_of_two(streams),
            BLOCK=_channels(streams),
        )
    return out


def head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    x = h.new_empty(len(h), h.shape[2])
    _read(h, fn, base, scale, norm_eps, eps, x, None, 0)
    return x


def _read(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    x: Tensor,
    mixed: tuple[Tensor, Tensor] | None,
    iterations: int,
) -> None:
    """x, and post and carry where they are to be made."""
    h, (n, streams, width) = h.contiguous(), h.shape
    if not n:
        return
    made, flat = len(fn), streams * width
    how = launch(n, flat, num_sms(h.device))
    parts = h.new_empty(how.splits, n, made + 1, dtype=torch.float32)
    kernels.project[(triton.cdiv(n, how.rows), how.splits)](
        *(h, fn, parts, n, flat, how.depth),
        MADE=made,
        BLOCK_M=how.rows,
        BLOCK_N=max(power_of_two(made), 16),
        BLOCK_K=BLOCK_K,
    )
    kernels.read[(n, triton.cdiv(width, _channels(streams)))](
        *(h, parts, base, scale, x, *(mixed or (x, x)), n, norm_eps, eps),
        WIDTH=width,
        STREAMS=streams,
        PADDED=power_of_two(streams),
        MADE=made,
        SPLITS=how.splits,
        ITERATIONS=iterations,
        MIX=mixed is not None,
        BLOCK=_channels(streams),
    )


def _channels(streams: int) -> int:
    return max(BLOCK // power_of_two(streams), 16)
