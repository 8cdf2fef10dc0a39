"""All completed windows together, some at a time, over the step's own tokens and the tails that it
finds. Sums over slots halve them again and again: no bit depends on how many windows there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.blocks import NULL_BLOCK
from trueline.cache.tails import TailLayout, TailView
from trueline.ops import invariant_math as bits
from trueline.ops.compress import IMPLEMENTATIONS, CompressRows, CompressRun, CompressTable
from trueline.ops.launch import power_of_two
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.ops.rope import cpu as rope
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["cpu"]

# Numbers of a gathered part: they fit a cache.
AT_ONCE = 1 << 19
_NOBODY = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Prepared:
    phases: Tensor  # [n] position % ratio
    kept: Tensor | None  # tokens whose tails later steps may read; None: all
    before: Tensor  # [b] cells of positions before the step that its windows need
    slots: Tensor  # [m, slots] tokens, or n and a place in `before`
    missing: Tensor  # [m, slots, 1] slots that do not count; they show the window's own


def prepare(rows: CompressRows | CompressTable, tails: TailView) -> Prepared:
    assert not isinstance(rows, CompressTable), "tables are for GPUs"
    layout = tails.layout
    count, before, kept = sum(run.count for run in rows.runs), list[int](), list[int]()
    phases, slots, missing = [_NOBODY], [_NOBODY.view(0, layout.slots)], [_NOBODY]
    first = 0
    for run in rows.runs:
        phases.append(torch.arange(run.start, run.stop) % layout.ratio)
        kept += _kept(run, first, layout)
        windows = torch.tensor(run.windows(layout.ratio), dtype=torch.long)
        if len(windows):
            at = ((windows + 1) * layout.ratio)[:, None] + torch.arange(-layout.slots, 0)
            missing.append(at)
            at = torch.where(at < 0, at + layout.ratio, at)
            oldest = min(int(at.min()), run.start)
            held = count + len(before) + at - oldest
            slots.append(torch.where(at < run.start, held, first + at - run.start))
            before += layout.cells(run.tails, oldest, run.start)
        first += run.count
    return Prepared(
        torch.cat(phases),
        None if len(kept) == count else torch.tensor(kept, dtype=torch.long),
        torch.tensor(before, dtype=torch.long),
        torch.cat(slots),
        torch.cat([at.view(-1, layout.slots, 1) < 0 for at in missing]),
    )


def _kept(run: CompressRun, first: int, layout: TailLayout) -> Iterator[int]:
    """Of its tokens, which are the step's from `first` on."""
    size = layout.block_size
    for block in range(run.start // size, -(-run.stop // size)):
        if run.tails[block] != NULL_BLOCK:
            start, stop = max(block * size, run.start), min((block + 1) * size, run.stop)
            yield from range(first + start - run.start, first + stop - run.start)


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
    layout, n = tails.layout, len(u)
    rows = torch.empty(n + len(prepared.before), 2, layout.width)
    rows[:n, 0] = u
    torch.add(z.float(), ape.float()[prepared.phases], out=rows[:n, 1])
    rows[n:] = tails.rows[prepared.before]
    if prepared.kept is None:
        tails.write(cells, rows[:n])
    else:
        tails.write(cells[prepared.kept], rows[prepared.kept])
    step = max(AT_ONCE // (layout.slots * layout.width), 1)
    pooled = torch.empty(len(prepared.slots), layout.dim)
    for start in range(0, len(pooled), step):
        part = slice(start, start + step)
        pooled[part] = _pooled(rows, layout, prepared.slots[part], prepared.missing[part])
    y = rms_norm.run(pooled, norm.float(), eps)
    rotated = 2 * cos.shape[1]
    kept = layout.dim - rotated
    turned = rope.run(y[:, None, kept:], cos, sin, pairing)[:, 0]
    return torch.cat((y[:, :kept], turned), dim=1).to(norm.dtype)


def _pooled(rows: Tensor, layout: TailLayout, slots: Tensor, missing: Tensor) -> Tensor:
    dim, ratio = layout.dim, layout.ratio
    held = rows[slots]  # [m, slots, 2, width]
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
