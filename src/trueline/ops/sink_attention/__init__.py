"""Attention over the last positions of a sequence and its compressed entries, with a sink per head.

`prepare(rows, window, entries, tiling, size=…, ratio=…)` once a step; `run(q [n, heads, width],
window, entries, prepared, sinks=[heads] float32, softmax_scale=…, chosen=None)` per layer -> out
[n, heads, width]. `size`, `ratio` and `softmax_scale` have no default.

A token at position p sees positions max(0, p - size + 1) … p of the window's cache, and entries
0 … (p + 1) // ratio - 1 of the entries' cache; ratio 0: none, and `entries` is None. With `chosen`
[n, k] it sees only the entries listed: distinct logical numbers, in the order in which they are
added up; a list ends at its first -1, and what follows is not looked at. An entry that a token does
not see is an error; on a GPU, where raising it would make the host wait, its output is NaN.

One softmax goes over both and the head's sink, which adds exp(sink) to the denominator and nothing
to the sum. Key and value are the same cache row, all of its numbers: queries are rotated already,
and the caller rotates the output back. Blocks behind the window are null, and nobody reads them.

With full tiles, cut at every multiple of the tile from the first position of the window and from
entry 0 or the first of the list, a token's bits depend on the token alone; a list of all entries
that it sees, in their order, has the bits of no list.

On a GPU `prepare` also takes a `SinkTable`, whose numbers the host does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import CPU, GPU, NATIVE_ACTIVATIONS, Capabilities, Context
from trueline.ops.mla_decode import Tiling
from trueline.ops.sparse_rows import Run, SparseRows


@dataclass(frozen=True, slots=True)
class SinkRun:
    """Positions [start, start + count) of one sequence, and its blocks. Of the window's, those
    behind the window of `start` may be null."""

    window: list[int]
    entries: list[int]
    start: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class SinkRows:
    runs: tuple[SinkRun, ...]

    def near(self, size: int, block_size: int) -> SparseRows:
        """What the tokens see of the window's cache, over the blocks that they reach into alone:
        counted from the first of these, whatever the context is."""
        found = []
        for run in self.runs:
            first = max(run.start - size + 1, 0) // block_size
            blocks = run.window[first : -(-(run.start + run.count) // block_size)]
            found.append(Run(blocks, run.start + 1 - first * block_size, run.count))
        return SparseRows(tuple(found))


@dataclass(frozen=True, slots=True)
class SinkTable:
    """The same on a device, of rows with `tokens_per_row` tokens each that follow each other."""

    window: Tensor  # [rows, most]
    entries: Tensor | None  # [rows, most]
    lengths: Tensor  # [rows * tokens_per_row]: a token's position + 1; 0: it only fills the table
    tokens_per_row: int


Prepared = TypeVar("Prepared")


class SinkAttention(Protocol[Prepared]):
    capabilities: Capabilities

    def prepare(
        self,
        rows: SinkRows | SinkTable,
        window: LatentView,
        entries: LatentView | None,
        tiling: Tiling,
        *,
        size: int,
        ratio: int,
    ) -> Prepared: ...

    def run(
        self,
        q: Tensor,
        window: LatentView,
        entries: LatentView | None,
        prepared: Prepared,
        *,
        sinks: Tensor,
        softmax_scale: float,
        chosen: Tensor | None,
    ) -> Tensor: ...


def _fp8_refusals(context: Context) -> list[str]:
    if context.latent is not None and context.latent.fp8 is not None:
        return [f"reads cache rows as they are computed, not {context.latent.fp8.storage}"]
    return []


GPU_SINK = replace(GPU, refuses=_fp8_refusals)
IMPLEMENTATIONS = {"native": NATIVE_ACTIVATIONS, "cpu": CPU, "reference": CPU, "triton": GPU_SINK}
