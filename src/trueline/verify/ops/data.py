"""Data that hides nothing: needles, unequal prime-ish dims, shuffled blocks, NaN in every byte that
is not owned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueline.cache.layout import LatentFp8, LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.device import interpreting
from trueline.ops.capabilities import HeadDims
from trueline.ops.linear import LinearOp
from trueline.ops.mla_decode import DecodeRows, MLADecodeOp
from trueline.ops.mla_prefill import HeadWeights
from trueline.ops.registry import implementation
from trueline.verify.bounds import require_within
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

    def scaled(self, case: int) -> Dims:
        """Another softmax scale in each case: an op that ignores the one it is given shows."""
        return replace(self, scale=self.scale * (1 + case / 8))

    def weights(self, heads: int, dtype: torch.dtype) -> HeadWeights:
        """That keep numbers about as large as they were."""
        key = randn(heads, self.latent, self.nope, seed=5) / math.sqrt(self.latent)
        value = randn(heads, self.value, self.latent, seed=6) / math.sqrt(self.latent)
        return HeadWeights(key.to(dtype), value.to(dtype))

    def heads(self, count: int) -> HeadDims:
        return HeadDims(count, self.nope, self.value)


def torch_linear() -> LinearOp:
    """For ops that are given a linear."""
    return implementation("linear", "torch_mm")


def decode_beside() -> MLADecodeOp:
    """What an implementation of mla_prefill is given for its rows of a few tokens."""
    on_gpu = interpreting() or torch.get_default_device().type == "cuda"
    return implementation("mla_decode", "triton" if on_gpu else "cpu")


SMALL = Dims()
WIDE = Dims(512, 64, 128, 128, scale=0.02)
"""Of large models, which GPUs may have kernels of their own for."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on whatever device is the default: checks run there."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def shuffled(count: int, seed: int) -> list[int]:
    """1..count in some order, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = (torch.randperm(count, generator=generator, device="cpu") + 1).tolist()
    return order


def require(good: bool, what: str) -> None:
    if not good:
        raise CheckFailed(f"op = reference: {what}")


def within(what: str, ours: Tensor, exact: Tensor, accepted: Tensor) -> None:
    require_within(f"op = reference: {what}", ours, exact, accepted)


def close(what: str, ours: Tensor, exact: Tensor, relative: float) -> None:
    within(what, ours, exact, relative * exact.double().abs())


def rounded_alike(what: str, ours: Tensor, wanted: Tensor) -> None:
    """Of a narrow dtype: rounded wherever the reference rounds. A number in a hundred, and two, may
    end on the other side of a rounding, as after a sum in another order."""
    close(what, ours, wanted, torch.finfo(ours.dtype).eps)
    others = int((ours != wanted).sum())
    few = 2 + ours.numel() // 100
    require(others <= few, f"{what}: {others} of {ours.numel()} numbers are rounded otherwise")


def paged(
    lengths: list[int],
    block_size: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    dims: Dims = SMALL,
    fp8: LatentFp8 | None = None,
    factors: Callable[[int, int], Tensor] | None = None,
) -> tuple[LatentView, DecodeRows]:
    """A cache with shuffled blocks and a needle in every row; every byte not owned is NaN.
    `factors(positions, channels)`: of latents."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 8
    ids = shuffled(num_blocks - 1, seed)
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    latent = dims.latent
    layout = LatentLayout(*dims.cached, block_size, fp8)
    store = LatentStore(layout, 1, num_blocks, dtype)
    store.poison(range(num_blocks))
    view = store.views[0]
    for row, length in enumerate(lengths):
        if length:
            numbers = randn(length, dims.width, seed=seed + row + 1)
            numbers[length // 2] *= 12
            if factors is not None:
                numbers[:, :latent] *= factors(length, latent)
            cells = torch.tensor(layout.cells(blocks[row], 0, length))
            view.write(cells, numbers[:, :latent], numbers[:, latent:])
    return view, DecodeRows(lengths, blocks)


def group_amax(x: Tensor, group: int) -> Tensor:
    """[n, channels]: the largest size in each channel's group."""
    parts = torch.split(x.abs(), group, dim=1)
    return torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in parts], dim=1)
