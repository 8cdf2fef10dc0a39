"""One token, one head at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import Tiling
from trueline.ops.sink_attention import IMPLEMENTATIONS, SinkRows, SinkTable

capabilities = IMPLEMENTATIONS["reference"]


@dataclass(frozen=True, slots=True)
class Prepared:
    rows: SinkRows
    size: int
    ratio: int


def prepare(
    rows: SinkRows | SinkTable,
    window: LatentView,
    entries: LatentView | None,
    tiling: Tiling,
    *,
    size: int,
    ratio: int,
) -> Prepared:
    assert not isinstance(rows, SinkTable), "tables are for GPUs"
    return Prepared(rows, size, ratio)


def run(
    q: Tensor,
    window: LatentView,
    entries: LatentView | None,
    prepared: Prepared,
    *,
    sinks: Tensor,
    softmax_scale: float,
    chosen: Tensor | None,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token, keys in enumerate(seen(window, entries, prepared, chosen)):
        for head in range(q.shape[1]):
            dots = keys @ q[token, head].double() * softmax_scale
            with_sink = torch.cat((dots, sinks[head].double().view(1)))
            out[token, head] = with_sink.softmax(0)[:-1] @ keys
    return out.to(q.dtype)


def seen(
    window: LatentView, entries: LatentView | None, prepared: Prepared, chosen: Tensor | None
) -> list[Tensor]:
    """The rows [keys, width] that each token meets."""
    made: list[Tensor] = []
    for run in prepared.rows.runs:
        for p in range(run.start, run.start + run.count):
            positions = [s for s in range(p + 1) if s > p - prepared.size]
            keys = [stored_rows(window, _cells(window, run.window, positions))]
            if entries is not None:
                numbers = [w for w in range(p + 1) if (w + 1) * prepared.ratio <= p + 1]
                if chosen is not None:
                    listed = chosen[len(made)].tolist()
                    numbers = listed[: listed.index(-1)] if -1 in listed else listed
                keys.append(stored_rows(entries, _cells(entries, run.entries, numbers)))
            made.append(torch.cat(keys))
    return made


def _cells(view: LatentView, block_ids: list[int], numbers: list[int]) -> Tensor:
    size = view.layout.block_size
    found = [block_ids[i // size] * size + i % size for i in numbers]
    return torch.tensor(found, dtype=torch.long)
