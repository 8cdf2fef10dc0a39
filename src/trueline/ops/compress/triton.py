from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.index import IndexView
from trueline.cache.store import LatentView
from trueline.cache.tails import TailView
from trueline.ops.compress import IMPLEMENTATIONS, CompressRows, CompressTable
from trueline.ops.compress.kernels import compress
from trueline.ops.launch import copied, power_of_two, unit_stride
from trueline.ops.rope.triton import places
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["triton"]

TILE = 8
"""Slots that are read together."""
ROWS: Mapping[str, int | str | None] = dict.fromkeys(
    ("KIND", "ENTRIES", "BLOCK", "TOKEN", "KEY", "ITEM")
)
"""Of entries that follow each other."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the tokens of a table do not say themselves."""

    starts: Tensor  # [n] the first position of a token's run in this step
    runs: Tensor  # [n]
    places: Tensor  # [n] its row of the output; -1: it completes nothing
    count: int


@dataclass(frozen=True, slots=True)
class Prepared:
    table: Tensor  # [rows, most]
    lengths: Tensor  # [n]
    tokens_per_row: int
    host: HostRows | None


def prepare(rows: CompressRows | CompressTable, tails: TailView) -> Prepared:
    if isinstance(rows, CompressTable):
        return Prepared(rows.tails, rows.lengths, rows.tokens_per_row, None)
    ratio, runs = tails.layout.ratio, rows.runs
    most = max((len(run.tails) for run in runs), default=0) or 1
    blocks = [b for run in runs for b in (*run.tails, *[0] * (most - len(run.tails)))]
    tokens = [(i, run, p) for i, run in enumerate(runs) for p in range(run.start, run.stop)]
    found, count = [], 0
    for _, _, position in tokens:
        completes = (position + 1) % ratio == 0
        found.append(count if completes else -1)
        count += completes
    table, lengths, starts, owners, at = copied(
        (
            blocks,
            [position + 1 for _, _, position in tokens],
            [run.start for _, run, _ in tokens],
            [i for i, _, _ in tokens],
            found,
        ),
        tails.rows.device,
    )
    return Prepared(table.view(-1, most), lengths, 1, HostRows(starts, owners, at, count))


def run(
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
) -> Tensor:
    out = norm.new_empty(prepared.host.count if prepared.host else len(u), tails.layout.dim)
    _go(u, z, tails, cells, prepared, (ape, norm), eps, (cos, sin, pairing), out, None, ROWS)
    return out


def run_into(
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
) -> None:
    assert entries.layout.fp8 is None, "the cache's own write quantises"
    if isinstance(entries, LatentView):
        out, how = entries.rows, ROWS
    else:
        layout = entries.layout
        out = entries.bytes.view(DTYPES[layout.storage])
        how = {
            "KIND": layout.kind,
            "ENTRIES": layout.block_size,
            "BLOCK": layout.block_bytes,
            "TOKEN": layout.token_bytes,
            "KEY": layout.key_bytes,
            "ITEM": layout.itemsize,
        }
    _go(u, z, tails, cells, prepared, (ape, norm), eps, (cos, sin, pairing), out, at, how)


def _go(
    u: Tensor,
    z: Tensor,
    tails: TailView,
    cells: Tensor,
    prepared: Prepared,
    weights: tuple[Tensor, Tensor],
    eps: float,
    rope: tuple[Tensor, Tensor, Pairing],
    out: Tensor,
    at: Tensor | None,
    how: Mapping[str, int | str | None],
) -> None:
    layout, host, (cos, sin, pairing), (ape, norm) = tails.layout, prepared.host, rope, weights
    u, z, cos, sin = (unit_stride(x) for x in (u, z, cos, sin))
    assert tails.rows.is_contiguous()
    assert out.is_contiguous()
    if not len(u):
        return
    half = cos.shape[-1]
    step, shift = places(half, pairing)
    kept = layout.dim - 2 * half
    tile = min(TILE, power_of_two(layout.slots))
    compress[(len(u),)](
        *(u, z, tails.rows, cells, prepared.table, prepared.lengths),
        *((host.starts, host.runs, host.places) if host else (None, None, None)),
        *(ape.contiguous(), norm, cos, sin, out, eps, prepared.tokens_per_row),
        *(u.stride(0), z.stride(0), prepared.table.stride(0), cos.stride(0), sin.stride(0), at),
        RATIO=layout.ratio, OVERLAP=layout.overlap, DIM=layout.dim, WIDTH=layout.width,
        WHOLE=power_of_two(layout.width), SIZE=layout.block_size, KEPT=kept,
        KEPT_BLOCK=power_of_two(max(kept, 1)), HALF=half, HALF_BLOCK=power_of_two(max(half, 1)),
        STEP=step, SHIFT=shift, TILE=tile, **how,
        num_warps=8 if layout.slots * layout.dim > 4096 else 4,
    )  # fmt: skip
