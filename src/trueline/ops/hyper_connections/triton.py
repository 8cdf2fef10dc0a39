"""Two kernels between two sub-layers, and two for a mix or the head. One for a merge by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trueline.ops.hyper_connections import IMPLEMENTATIONS, Mixed, kernels
from trueline.ops.launch import num_sms, power_of_two
from trueline.ops.rms_norm import RMSNorm

capabilities = IMPLEMENTATIONS["triton"]

BLOCK_K = 32
"""Channels of a stream that a program reads at a time, of all streams."""
SPLITS = 128
"""At most: one program adds up all parts of a token."""
PROGRAMS_PER_SM = 2
MERGED = 1024
"""Numbers of a program that only merges, of all streams together."""
PER_THREAD = 32


@dataclass(frozen=True, slots=True)
class ProjectLaunch:
    rows: int
    splits: int
    depth: int
    """Channels of a split."""


def launch(tokens: int, width: int, sms: int) -> ProjectLaunch:
    """As many splits of a stream's channels as the GPU runs at a time."""
    rows = 16 if tokens <= 1024 else 32
    blocks = triton.cdiv(width, BLOCK_K)
    most = max(PROGRAMS_PER_SM * sms // triton.cdiv(tokens, rows), 1)
    depth = triton.cdiv(blocks, min(SPLITS, most)) * BLOCK_K
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
    h = h.contiguous()
    parts = _projected(h, fn, None)
    return _mixed(h, parts, base, scale, None, norm_eps, eps, iterations)


def merge(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
    h, y = h.contiguous(), y.contiguous()
    n, streams, width = h.shape
    out = torch.empty_like(h)
    block = max(MERGED // power_of_two(streams), 16)
    if n:
        kernels.merge[(n, triton.cdiv(width, block))](
            *(h, y, mixed.post, mixed.carry, out, width),
            STREAMS=streams,
            PADDED=power_of_two(streams),
            BLOCK=block,
        )
    return out


def advance(
    h: Tensor,
    y: Tensor,
    mixed: Mixed,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm: RMSNorm,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Mixed]:
    h = h.contiguous()
    merged = torch.empty_like(h)
    parts = _projected(h, fn, (y.contiguous(), mixed.post, mixed.carry, merged))
    return merged, _mixed(merged, parts, base, scale, weight, norm_eps, eps, iterations)


def head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    h = h.contiguous()
    x = h.new_empty(len(h), h.shape[2])
    _read(h, _projected(h, fn, None), base, scale, None, norm_eps, eps, x, None, 0)
    return x


def _projected(h: Tensor, fn: Tensor, merging: tuple[Tensor, ...] | None) -> Tensor:
    """[splits, n, rows of fn + 1]. `merging`: y, post, carry, and where the new streams go."""
    n, streams, width = h.shape
    how, made = launch(max(n, 1), width, num_sms(h.device)), len(fn)
    parts = h.new_empty(how.splits, n, made + 1, dtype=torch.float32)
    y, post, carry, merged = merging or (h, parts, parts, h)
    if n:
        kernels.project[(triton.cdiv(n, how.rows), how.splits)](
            *(h, y, post, carry, fn, merged, parts, n, how.depth),
            WIDTH=width,
            STREAMS=streams,
            MADE=made,
            MERGE=merging is not None,
            BLOCK_M=how.rows,
            BLOCK_N=max(power_of_two(made), 16),
            BLOCK_K=BLOCK_K,
        )
    return parts


def _mixed(
    h: Tensor,
    parts: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Mixed:
    n, streams, width = h.shape
    x = h.new_empty(n, width)
    post = h.new_empty(n, streams, dtype=torch.float32)
    carry = h.new_empty(n, streams, streams, dtype=torch.float32)
    _read(h, parts, base, scale, weight, norm_eps, eps, x, (post, carry), iterations)
    return Mixed(x, post, carry)


def _read(
    h: Tensor,
    parts: Tensor,
    base: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    eps: float,
    x: Tensor,
    mixed: tuple[Tensor, Tensor] | None,
    iterations: int,
) -> None:
    """x, normed where there is a weight, and post and carry where they are to be made."""
    n, streams, width = h.shape
    splits, _, made = parts.shape
    block = power_of_two(width)
    if n:
        kernels.read[(n, 1 if mixed is None else 2)](
            *(
                h,
                parts,
                base,
                scale,
                x if weight is None else weight,
                x,
                *(mixed or (parts, parts)),
            ),
            *(n, splits, norm_eps, eps),
            WIDTH=width,
            STREAMS=streams,
            MADE=made - 1,
            COLUMNS=power_of_two(made),
            SPLITS=SPLITS,
            ITERATIONS=iterations,
            NORM=weight is not None,
            BLOCK=block,
            num_warps=min(max(block // (32 * PER_THREAD), 1), 16),
        )
