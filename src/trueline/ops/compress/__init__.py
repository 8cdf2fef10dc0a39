"""Compressed entries: every `ratio` positions of a sequence, pooled into one row.

`prepare(rows, tails)` once a step; `run(u [n, width], z [n, width], tails, cells [n], prepared,
ape=[ratio, width], norm=[dim], eps=…, cos=[m, rope/2], sin=…, pairing=…)` per layer -> entries
[m, dim] in the dtype of `norm`.

- Every token's (u, z + ape[position % ratio]) is written to its cell of the tails, in float32.
  Where no later step reads it, that may be one of the null block: what is there is undefined.
- Window w is positions ratio·w … ratio·w + ratio - 1. The token that completes it makes entry w, of
  what is given for the step's own tokens, and of what the tails hold for those before: per channel,
  softmax over the positions of z + ape, times u, added up. With overlap there are 2·ratio slots:
  the window before by the first half of the width, then the window itself by the second half;
  window 0 has no window before it, and pools its own positions alone.
- Then an RMS norm with weight, and rotation of the last 2·(rope/2) channels by `cos` and `sin`,
  rows of the layer's table at the entries' positions ratio·w. All in float32, rounded once.

Where the rows are the host's, m is the number of windows that the step completes, in the order of
its tokens; `entry_cells` and `entry_positions` say where their entries go and at which positions
they are rotated. On a GPU `prepare` also takes a `CompressTable`, whose numbers the host does not
know: there m = n, and the rows of tokens that complete nothing are undefined.

Optional, because the cache's own write does as well: `run_into(…, entries=view, at=[m])`, which is
`run`, but that each entry goes to its row of a cache that is not in fp8; on a GPU, of tokens that
complete nothing no row is written.

The bits of a batch-invariant implementation depend on a window's (u, z + ape) in float32 alone: not
on how the tokens were cut into steps, nor on who shares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.store import LatentView
from trueline.cache.tails import TailView
from trueline.ops.capabilities import CPU, GPU, Capabilities
from trueline.spec.rope import Pairing


@dataclass(frozen=True, slots=True)
class CompressRun:
    """Positions [start, start + count) of one sequence, and its blocks of tails and entries. Of the
    tails' blocks, those that neither a window of this step reads from before `start`, nor a later
    step, may be null."""

    tails: list[int]
    entries: list[int]
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    def windows(self, ratio: int) -> range:
        """That these positions complete."""
        return range(self.start // ratio, self.stop // ratio)


@dataclass(frozen=True, slots=True)
class CompressRows:
    runs: tuple[CompressRun, ...]

    def entry_positions(self, ratio: int) -> Tensor:
        """[m] where each completed window begins."""
        found = [w * ratio for run in self.runs for w in run.windows(ratio)]
        return torch.tensor(found, dtype=torch.long, device="cpu")

    def entry_cells(self, ratio: int, size: int) -> Tensor:
        """[m] where their entries go, in blocks of `size` entries."""
        found = [
            run.entries[w // size] * size + w % size
            for run in self.runs
            for w in run.windows(ratio)
        ]
        return torch.tensor(found, dtype=torch.long, device="cpu")


@dataclass(frozen=True, slots=True)
class CompressTable:
    """The same on a device, of rows with `tokens_per_row` tokens each that follow each other."""

    tails: Tensor  # [rows, most]
    lengths: Tensor  # [rows * tokens_per_row]: a token's position + 1; 0: it only fills the table
    tokens_per_row: int


Prepared = TypeVar("Prepared")


class Compress(Protocol[Prepared]):
    capabilities: Capabilities

    def prepare(self, rows: CompressRows | CompressTable, tails: TailView) -> Prepared: ...

    def run(
        self,
        u: Tensor,
        z: Tensor,
        tails: TailView,
        cells: Tensor,
        prepared: Prepared,
        *,
        ape: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pairing: Pairing,
    ) -> Tensor: ...


class CompressInto(Compress[Prepared], Protocol):
    def run_into(
        self,
        u: Tensor,
        z: Tensor,
        tails: TailView,
        cells: Tensor,
        prepared: Prepared,
        *,
        ape: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pairing: Pairing,
        entries: LatentView | IndexView,
        at: Tensor,
    ) -> None: ...


IMPLEMENTATIONS = {"cpu": CPU, "reference": CPU, "triton": replace(GPU, optional=("run_into",))}
