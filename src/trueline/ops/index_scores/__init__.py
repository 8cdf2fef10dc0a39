"""The indexer's scores of cached keys, for every row:

    score[t, s] = Σ_h weights[t, h] · relu(q[t, h] · k[s])        s < length of t

- `prepare(rows, view, tiling, topk=…)` once a step; `run(q [n, heads, dim], weights [n, heads],
  view, prepared)` per layer -> scores [n, width] float32, -inf from a row's length on.
- q is rotated already. `weights` are float32 and carry every factor there is: the head's weight,
  the scale of the heads and the softmax scale. The op knows none of them, so it has no default.
- Keys are what the view reads; products and sums are float32.
- Rows that see no more than `topk` positions select all of them: they are not scored, and are -inf
  throughout. `width` is the longest scored row's length, 0 if there is none. topk = 0 scores all.
- On a GPU `prepare` also takes a `Table` that lies there and whose numbers the host does not know:
  `width` is then what the table has room for. What stands from a row's length on, and in rows that
  are not scored, is undefined there: `topk` looks at neither, and writing it would
  take as long as the scores of short rows in a wide table.
- With full tiles, the bits of a score depend on its own query, weights and key alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from trueline.cache.index import IndexView
from trueline.ops.capabilities import CPU, NATIVE, Capabilities, Context
from trueline.ops.index_write import GPU_INDEX
from trueline.ops.mla_decode import Tiling
from trueline.ops.sparse_rows import SparseRows, Table

Prepared = TypeVar("Prepared")


class IndexScores(Protocol[Prepared]):
    capabilities: Capabilities

    def prepare(
        self, rows: SparseRows | Table, view: IndexView, tiling: Tiling, *, topk: int
    ) -> Prepared: ...

    def run(self, q: Tensor, weights: Tensor, view: IndexView, prepared: Prepared) -> Tensor: ...


def _native_refusals(context: Context) -> list[str]:
    layout = context.index
    if layout is not None and layout.fp8 is None and layout.storage != "float32":
        return [f"reads float32 and fp8 keys, not {layout.storage}"]
    return NATIVE.refuses(context)


IMPLEMENTATIONS = {
    "native": replace(NATIVE, refuses=_native_refusals),
    "cpu": CPU,
    "reference": CPU,
    "triton": GPU_INDEX,
}
