"""Data that hides nothing: needles, unequal prime-ish dims, shuffled blocks, NaN in every byte that
is not owned; and how far from the exact numbers a row may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.mla_prefill import HeadWeights
from trueline.verify.failed import CheckFailed

L, R, H, P, V = 37, 10, 5, 13, 11


@dataclass(frozen=True)
class Dims:
    """Of latent attention."""

    latent: int = L
    rope: int = R
    nope: int = P
    value: int = V
    scale: float = 0.21

    @property
    def cached(self) -> tuple[int, int]:
        return self.latent, self.rope

    @property
    def width(self) -> int:
        return self.latent + self.rope

    def weights(self, heads: int, dtype: torch.dtype) -> HeadWeights:
        """That keep numbers about as large as they were."""
        key = randn(heads, self.latent, self.nope, seed=5) / math.sqrt(self.latent)
        value = randn(heads, self.value, self.latent, seed=6) / math.sqrt(self.latent)
        return HeadWeights(key.to(dtype), value.to(dtype))


SMALL = Dims()
WIDE = Dims(512, 64, 128, 128, scale=0.02)
"""Of large models, which GPUs may have kernels of their own for."""
GATE = 3e-6
"""Largest relative error of a row, float32 to float64."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on whatever device is the default: checks run there."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def rounded(dtype: torch.dtype, roundings: float, exact: float = GATE) -> float:
    """The gate of a result that is rounded to `dtype` so many times; `exact` in float32."""
    return exact if dtype == torch.float32 else exact + roundings * torch.finfo(dtype).eps / 2


def shuffled(count: int, seed: int) -> list[int]:
    """1..count in some order, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = (torch.randperm(count, generator=generator, device="cpu") + 1).tolist()
    return order


def require(good: bool, what: str) -> None:
    if not good:
        raise CheckFailed(f"op = reference: {what}")


def close(what: str, ours: Tensor, exact: Tensor, gate: float = GATE) -> None:
    """Per row, so that no large row hides a small one."""
    near(what, ours, exact, exact, gate)


def near(what: str, ours: Tensor, exact: Tensor, size: Tensor, gate: float) -> None:
    """The same, but an error is measured by `size`: what a row's terms add up to."""
    require(ours.shape == exact.shape, f"{what}: shape {list(ours.shape)}, not {list(exact.shape)}")
    error = (ours.double() - exact.double()).norm(dim=-1)
    worst = float((error / size.double().norm(dim=-1).clamp_min(1e-30)).max())
    # the comparison is false for NaN too
    require(worst <= gate, f"{what}: a row is off by {worst:.2g}, accepted {gate:g}")


def rounded_alike(what: str, ours: Tensor, wanted: Tensor) -> None:
    """Of a narrow dtype: rounded wherever the reference rounds. A number in a hundred may end on
    the other side of a rounding, as after a sum in another order."""
    close(what, ours, wanted, torch.finfo(ours.dtype).eps)
    others = float((ours != wanted).double().mean())
    require(others < 0.01, f"{what}: {others:.1%} of the numbers are rounded otherwise")


def paged(
    lengths: list[int],
    block_size: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    dims: Dims = SMALL,
) -> tuple[LatentView, DecodeRows]:
    """A cache with shuffled blocks and a needle in every row; every byte not owned is NaN."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 8
    ids = shuffled(num_blocks - 1, seed)
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    latent = dims.latent
    layout = LatentLayout(*dims.cached, block_size)
    store = LatentStore(layout, 1, num_blocks, dtype)
    store.poison(range(num_blocks))
    view = store.views[0]
    for row, length in enumerate(lengths):
        if length:
            numbers = randn(length, dims.width, seed=seed + row + 1)
            numbers[length // 2] *= 12
            cells = torch.tensor(layout.cells(blocks[row], 0, length))
            view.write(cells, numbers[:, :latent], numbers[:, latent:])
    return view, DecodeRows(lengths, blocks)
