"""Absorbed latent attention of every row over its chosen positions in the paged cache.

`prepare(rows, view, tiling)` once a step; `run(q [n, heads, width], view, prepared, positions
[n, k], softmax_scale=…)` per layer -> out [n, heads, latent], lse [n, heads] in natural log (-inf
where nothing is chosen, with zeros as output). `softmax_scale` has no default.

`positions` are logical, in the order in which they are to be added up; a row's list ends at its
first -1, and what follows is not looked at. A position that the row does not see is an error; on a
GPU, where raising it would make the host wait, nothing is read for that row, and its output and lse
are NaN. With full tiles, cut at every 64th entry of the list, a row's bits depend on the row alone.
Work and memory go by the lists' lengths, not by the context's.

On a GPU `prepare` also takes a `Table` there, whose numbers the host does not know.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import CPU, GPU_LATENT, NATIVE, Capabilities
from trueline.ops.mla_decode import HOPPER, Tiling
from trueline.ops.sparse_rows import SparseRows, Table

Prepared = TypeVar("Prepared")


class SparseMLA(Protocol[Prepared]):
    capabilities: Capabilities

    def prepare(self, rows: SparseRows | Table, view: LatentView, tiling: Tiling) -> Prepared: ...

    def run(
        self,
        q: Tensor,
        view: LatentView,
        prepared: Prepared,
        positions: Tensor,
        *,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]: ...


IMPLEMENTATIONS = {
    "native": NATIVE,
    "cpu": CPU,
    "reference": CPU,
    "hopper": HOPPER,
    "triton": GPU_LATENT,
}
