"""One kernel for a mix, its products, its Sinkhorn and what is read; one for a merge. Numbers of 16
bits are computed as float32."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.native import library
from trueline.ops.hyper_connections import IMPLEMENTATIONS, Mixed
from trueline.ops.rms_norm import RMSNorm

capabilities = IMPLEMENTATIONS["native"]


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
    x, post = torch.empty(n, width), torch.empty(n, streams)
    carry = torch.empty(n, streams, streams)
    wide, *given = (_plain(each) for each in (h, fn, base, scale))
    library().hc_mix(
        *(each.data_ptr() for each in (wide, *given)),
        *(norm_eps, eps, iterations, n, streams, width),
        *(each.data_ptr() for each in (x, post, carry)),
    )
    return Mixed(x.to(h.dtype), post, carry)


def merge(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
    given = [_plain(each) for each in (h, y, mixed.post, mixed.carry)]
    out = torch.empty(h.shape)
    library().hc_merge(*(each.data_ptr() for each in given), *h.shape, out.data_ptr())
    return out.to(h.dtype)


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
    h = merge(h, y, mixed)
    made = mix(h, fn, base, scale, norm_eps=norm_eps, eps=eps, iterations=iterations)
    return h, replace(made, x=norm.run(made.x, weight, norm_eps))


def head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float
) -> Tensor:
    n, streams, width = h.shape
    x = torch.empty(n, width)
    given = [_plain(each) for each in (h, fn, base, scale)]
    library().hc_head(
        *(each.data_ptr() for each in given), norm_eps, eps, n, streams, width, x.data_ptr()
    )
    return x.to(h.dtype)


def _plain(x: Tensor) -> Tensor:
    return x.float().contiguous()
