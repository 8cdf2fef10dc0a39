"""All completed windows together, some at a time. Sums over slots halve them again and again: no
bit depends on how many windows there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.tails import TailView
from trueline.ops import invariant_math as bits
from trueline.ops.compress import IMPLEMENTATIONS, CompressRows, CompressTable
from trueline.ops.launch import power_of_two
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.ops.rope import cpu as rope
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["cpu"]

# Numbers of a gathered part: they fit a cache.
AT_ONCE = 1 << 19


@dataclass(frozen=True, slots=True)
class Prepared:
    phases: Tensor  # [n] position % ratio
    cells: Tensor  # [m, slots]; a window's own where there is none before it
    missing: Tensor  # [m, slots, 1] slots that do not count


def prepare(rows: CompressRows | CompressTable, tails: TailView) -> Prepared:
    assert not isinstance(rows, CompressTable), "tables are for GPUs"
    layout = tails.layout
    phases, cells, missing = [], [torch.empty(0, layout.slots, dtype=torch.long)], [torch.empty(0)]
    for run in rows.runs:
        phases.append(torch.arange(run.start, run.stop) % layout.ratio)
        windows = torch.tensor(run.windows(layout.ratio), dtype=torch.long)
        if len(windows):
            last = (windows + 1) * layout.ratio
            at = last[:, None] + torch.arange(-layout.slots, 0)
            missing.append(at)
            at = torch.where(at < 0, at + layout.ratio, at)
            blocks = torch.tensor(run.tails)[at // layout.block_size]
            cells.append(layout.cell(blocks, at))
    return Prepared(
        torch.cat(phases) if phases else torch.empty(0, dtype=torch.long),
        torch.cat(cells),
        torch.cat([at.view(-1, layout.slots, 1) < 0 for at in missing]),
    )


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
    tails.write(cells, u.float(), z.float() + ape.float()[prepared.phases])
    layout = tails.layout
    step = max(AT_ONCE // (layout.slots * layout.width), 1)
    pooled = u.new_empty(len(prepared.cells), layout.dim, dtype=torch.float32)
    for start in range(0, len(pooled), step):
        part = slice(start, start + step)
        pooled[part] = _pooled(tails, prepared.cells[part], prepared.missing[part])
    y = rms_norm.run(pooled, norm.float(), eps)
    rotated = 2 * cos.shape[1]
    kept = layout.dim - rotated
    turned = rope.run(y[:, None, kept:], cos, sin, pairing)[:, 0]
    return torch.cat((y[:, :kept], turned), dim=1).to(norm.dtype)


def _pooled(tails: TailView, cells: Tensor, missing: Tensor) -> Tensor:
    layout = tails.layout
    dim, ratio = layout.dim, layout.ratio
    held = tails.rows[cells]  # [m, slots, 2, width]
    if layout.overlap:
        held = torch.cat((held[:, :ratio, :, :dim], held[:, ratio:, :, dim:]), dim=1)
    values, scores = held.unbind(2)
    scores = scores.masked_fill(missing, float("-inf"))
    weights = bits.exp(scores - scores.amax(1, keepdim=True))
    return _sum(weights * values) / _sum(weights)


def _sum(x: Tensor) -> Tensor:
    """x [m, slots, dim] over its slots."""
    while x.shape[1] > 1:
        half = power_of_two(x.shape[1]) // 2
        more = x[:, half:]
        x = torch.cat((x[:, : more.shape[1]] + more, x[:, more.shape[1] : half]), dim=1)
    return x[:, 0]
