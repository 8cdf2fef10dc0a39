"""Absorbed latent attention over the paged cache: one query per row, any number of rows.

`prepare(rows, view, tiling, heads)` once a step; `run(q [rows, heads, width], view, prepared,
softmax_scale=…)` per layer -> out [rows, heads, latent], lse [rows, heads] in natural log (-inf
where a row has no keys, whose output is zero). `softmax_scale` has no default.

On a GPU `prepare` also takes a `DecodeTable`, whose numbers the host does not know: a captured
graph serves any contexts that fit the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentView
from trueline.device import send
from trueline.ops.block_tables import padded
from trueline.ops.capabilities import (
    CPU,
    GPU_LATENT,
    HALF_PRECISION,
    NATIVE,
    Capabilities,
    Opaque,
)
from trueline.ops.mla_decode.launch_plan import hopper_refusals


@dataclass(frozen=True, slots=True)
class Tiling:
    """How keys are cut: at multiples of `size` from position 0. `full` tiles only, padded with
    zero rows, make every GEMM the same shape: what batch invariance needs."""

    size: int
    full: bool


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Each row's context: how many positions it sees, and the blocks that hold them."""

    lengths: list[int]
    block_ids: list[list[int]]

    def cells(self, row: int, layout: LatentLayout) -> list[int]:
        return layout.cells(self.block_ids[row], 0, self.lengths[row])

    def table(self, device: torch.device) -> DecodeTable:
        blocks = padded(self.block_ids, torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cpu")
        return DecodeTable(send(lengths, device), send(blocks, device))


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """The same on a device."""

    lengths: Tensor  # [rows] int32
    blocks: Tensor  # [rows, most] int32; the null block after a row's last


Prepared = TypeVar("Prepared")


class MLADecode(Protocol[Prepared]):
    capabilities: Capabilities

    def prepare(
        self, rows: DecodeRows | DecodeTable, view: LatentView, tiling: Tiling, heads: int
    ) -> Prepared: ...

    def run(
        self, q: Tensor, view: LatentView, prepared: Prepared, *, softmax_scale: float
    ) -> tuple[Tensor, Tensor]: ...


MLADecodeOp = MLADecode[Opaque]

HOPPER = replace(GPU_LATENT, dtypes=HALF_PRECISION, refuses=hopper_refusals)
IMPLEMENTATIONS = {
    "native": NATIVE,
    "cpu": CPU,
    "reference": CPU,
    "hopper": HOPPER,
    "triton": GPU_LATENT,
}
