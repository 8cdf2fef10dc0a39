"""Compressed entries against their float64 reference: every residue of a position, rows that
complete windows beside rows that do not, NaN wherever an entry may not look, and null blocks where
a step's tails are needed by no later one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.layout import IndexLayout, LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.cache.tails import TailLayout, TailStore, TailView
from trueline.ops.capabilities import Opaque
from trueline.ops.compress import (
    Compress,
    CompressInto,
    CompressRows,
    CompressRun,
    CompressTable,
)
from trueline.ops.compress import reference as compress_reference
from trueline.spec.rope import Pairing
from trueline.verify import bounds
from trueline.verify.ops.data import randn, require, shuffled, within

CompressOp = Compress[Opaque]

SHAPES: tuple[tuple[TailLayout, int, Pairing], ...] = (
    (TailLayout(23, 4, True, 8), 3, "interleaved"),
    (TailLayout(14, 3, True, 6), 7, "half-split"),
    (TailLayout(11, 1, True, 2), 2, "interleaved"),
    (TailLayout(16, 5, False, 5), 4, "interleaved"),
    (TailLayout(10, 1, False, 3), 5, "half-split"),
    (TailLayout(13, 9, False, 9), 6, "interleaved"),
)
"""Layouts, half of the rotated channels, and how they pair."""
WIDE_SHAPES: tuple[tuple[TailLayout, int, Pairing], ...] = (
    (TailLayout(512, 4, True, 8), 32, "interleaved"),
    (TailLayout(128, 4, True, 8), 32, "interleaved"),
    (TailLayout(512, 128, False, 128), 32, "interleaved"),
)
ENTRY_BLOCK = 3
SHUFFLED_BLOCK = 16 * ENTRY_BLOCK


@dataclass(frozen=True)
class CompressStep:
    """Rows with what their windows need of the past; NaN everywhere else, and null blocks where all
    that they held is behind. One position of each row is a needle."""

    layout: TailLayout
    rows: CompressRows
    store: TailStore
    cells: Tensor
    u: Tensor
    z: Tensor
    ape: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor
    pairing: Pairing

    def run(self, op: CompressOp, rows: CompressRows | CompressTable, view: TailView) -> Tensor:
        """In the order of the tokens, one row of cos and sin for each entry or each token."""
        at = _rotated_at(rows, self.layout.ratio).to(self.cos.device)
        return op.run(
            self.u, self.z, view, self.cells, op.prepare(rows, view), ape=self.ape, norm=self.norm,
            eps=self.eps, cos=self.cos[at], sin=self.sin[at], pairing=self.pairing,
        )  # fmt: skip

    def run_into(
        self,
        op: CompressInto[Opaque],
        rows: CompressRows | CompressTable,
        entries: LatentView | IndexView,
        cells: Tensor,
    ) -> None:
        at, view = _rotated_at(rows, self.layout.ratio).to(self.cos.device), self.fresh()
        op.run_into(
            self.u, self.z, view, self.cells, op.prepare(rows, view), ape=self.ape, norm=self.norm,
            eps=self.eps, cos=self.cos[at], sin=self.sin[at], pairing=self.pairing, entries=entries,
            at=cells,
        )  # fmt: skip

    @cached_property
    def exact(self) -> tuple[Tensor, TailView]:
        """Entries in float64, and the tails after the step."""
        view = self.fresh()
        wide = replace(self, norm=self.norm.double())
        return wide.run(compress_reference, self.rows, view), view  # type: ignore[arg-type]

    @property
    def eps(self) -> float:
        """Another in each layout."""
        return 1e-2 / self.layout.ratio

    def fresh(self) -> TailView:
        return TailView(self.store.rows[1].clone(), self.layout)


def counts(ratio: int) -> list[tuple[int, int]]:
    """Start and count: one token at every residue, from the first window on, and runs that begin
    and end within windows, at their edges and one beside."""
    single = [(start, 1) for start in range(2 * ratio + 2)]
    runs = [(0, 1), (0, ratio), (0, 3 * ratio + 1), (1, ratio), (ratio - 1, 2), (ratio, ratio + 1)]
    return [*single, *runs, (3 * ratio + 1, 2 * ratio), (2 * ratio, 2 * ratio - 1)]


def step(
    layout: TailLayout,
    half: int,
    pairing: Pairing,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    given: torch.dtype | None = None,
    *,
    all_kept: bool = False,
) -> CompressStep:
    """`given`: of u and z, if other than `dtype`. `all_kept`: of every sequence all that the step
    writes, not only of every second."""
    size, ratio, width = layout.block_size, layout.ratio, layout.width
    held = [-(-(start + count) // size) for start, count in shapes]
    num_blocks = sum(held) + 4
    ids = shuffled(num_blocks - 1, 3)
    store = TailStore(layout, 2, num_blocks)
    store.poison(range(num_blocks))
    runs, cells, entries = [], [], 1
    for i, ((start, count), blocks) in enumerate(zip(shapes, held, strict=True)):
        mine = [ids.pop() for _ in range(blocks)]
        needed = _needed(layout, start)
        past = layout.cells(mine, needed, start)
        store.rows[1, past] = randn(len(past), 2, width, seed=50 + i)
        mine[: needed // size] = [0] * (needed // size)
        if i % 2 and not all_kept:
            first, kept = -(-start // size), _needed(layout, start + count) // size
            mine[first:kept] = [0] * (kept - first)
        cells += layout.cells(mine, start, start + count)
        many = -(-(start + count) // (ratio * ENTRY_BLOCK))
        runs.append(CompressRun(mine, list(range(entries, entries + many)), start, count))
        entries += many
    n, longest = len(cells), max(start + count for start, count in shapes)
    u, z = (randn(n, width + 3, seed=seed)[:, 2:-1] for seed in (1, 2))  # strided
    z, spike = 2 * z, slice(0, n, 7)
    u[spike], z[spike] = 9 * u[spike], z[spike] + 2
    angle = torch.arange(longest)[:, None] * torch.linspace(1.0, 0.01, half)
    return CompressStep(
        layout=layout,
        rows=CompressRows(tuple(runs)),
        store=store,
        cells=torch.tensor(cells),
        u=u.to(given or dtype),
        z=z.to(given or dtype),
        ape=randn(ratio, width, seed=4),
        norm=(1 + randn(layout.dim, seed=5) / 3).to(dtype),
        cos=angle.cos(),
        sin=angle.sin(),
        pairing=pairing,
    )


def _needed(layout: TailLayout, start: int) -> int:
    """The first position that windows read which a step from `start` on completes."""
    return max((start // layout.ratio - layout.overlap) * layout.ratio, 0)


def compress(op: CompressOp, dtype: torch.dtype = torch.float32) -> None:
    for layout, half, pairing in SHAPES:
        check(op, step(layout, half, pairing, counts(layout.ratio), dtype), dtype)
    layout, half, pairing = SHAPES[0]
    wide = step(layout, half, pairing, counts(layout.ratio), dtype, torch.float32)
    check(op, wide, dtype)


def compress_wide(
    op: CompressOp,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[TailLayout, int, Pairing]] = WIDE_SHAPES,
) -> None:
    for layout, half, pairing in shapes:
        ratio = layout.ratio
        spans = [(ratio - 1, 1), (ratio, 1), (3 * ratio - 1, 1), (max(2 * ratio - 3, 0), 5)]
        check(op, step(layout, half, pairing, spans, dtype), dtype)


def check(op: CompressOp, step: CompressStep, dtype: torch.dtype) -> None:
    exact, tails = step.exact
    view = step.fresh()
    ours = step.run(op, step.rows, view)
    what = f"compress, {step.layout}"
    require(ours.dtype == dtype, f"{what}: {ours.dtype} for {dtype}")
    within(what, ours, exact, accepted(step, exact, dtype))
    require(_same_tails(view, tails), f"{what}: the tails are not (u, z + bias) of the tokens")
    check_into(op, step, step.rows, step.rows.entry_cells(step.layout.ratio, ENTRY_BLOCK), ours)


def _rotated_at(rows: CompressRows | CompressTable, ratio: int) -> Tensor:
    """Positions, of each entry or of each token's: of those that complete nothing, 0."""
    if isinstance(rows, CompressRows):
        return rows.entry_positions(ratio)
    return torch.where(rows.lengths % ratio == 0, rows.lengths - ratio, 0).clamp(min=0).long()


def check_into(
    op: CompressOp,
    step: CompressStep,
    rows: CompressRows | CompressTable,
    cells: Tensor,
    made: Tensor,
    written: Tensor | None = None,
) -> None:
    """Where an implementation writes entries itself: caches of rows and of keys, NaN elsewhere,
    have the bits of `run`. `written`: which of them; all, if None."""
    if "run_into" not in op.capabilities.optional:
        return
    into = cast("CompressInto[Opaque]", op)
    cells = cells.to(made.device)
    at = cells if written is None else cells[written]
    wanted = (made if written is None else made[written]).float()
    blocks = int(cells.max()) // ENTRY_BLOCK + 2 if len(cells) else 2
    others = torch.tensor(sorted(set(range(blocks * ENTRY_BLOCK)) - set(at.tolist())))
    for store, held in _caches(step, made.dtype, blocks):
        store.poison(range(held))
        view = store.views[1]
        step.run_into(into, rows, view, cells)
        read = view.gather if isinstance(view, LatentView) else view.read
        what = f"compress, {step.layout}, into {view.layout}"
        require(torch.equal(read(at).float(), wanted), f"{what}: other entries")
        require(bool(read(others).isnan().all()), f"{what}: other rows are written")


def _caches(
    step: CompressStep, dtype: torch.dtype, blocks: int
) -> Iterator[tuple[LatentStore | IndexStore, int]]:
    """With how many blocks each has: as many entries in all."""
    dim, rope = step.layout.dim, 2 * step.cos.shape[1]
    yield LatentStore(LatentLayout(dim - rope, rope, ENTRY_BLOCK, None), 2, blocks, dtype), blocks
    storage = str(dtype).removeprefix("torch.")
    for kind in ("rows", "planar"):
        yield IndexStore(IndexLayout(dim, ENTRY_BLOCK, storage, kind), 2, blocks), blocks
    if dim * dtype.itemsize % 16 == 0:
        few = -(-blocks * ENTRY_BLOCK // SHUFFLED_BLOCK)
        yield IndexStore(IndexLayout(dim, SHUFFLED_BLOCK, storage, "shuffled"), 2, few), few


def _same_tails(ours: TailView, exact: TailView) -> bool:
    owned = slice(ours.layout.block_size, None)  # the null block takes what nobody reads
    return torch.equal(*(view.rows[owned].nan_to_num(7e7) for view in (ours, exact)))


def accepted(step: CompressStep, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """How far entries may be off, [m, dim]."""
    made: list[Tensor] = []
    layout = step.layout
    given = step.rows, step.u, step.z, step.ape, step.fresh()
    for run, rows in zip(step.rows.runs, compress_reference.at_hand(*given), strict=True):
        for w in run.windows(layout.ratio):
            last = (w + 1) * layout.ratio
            slots = range(max(last - layout.slots, 0), last)
            held = torch.stack([rows[p] for p in slots]).double()
            first = layout.overlap * (torch.arange(-len(slots), 0) >= -layout.ratio).long()
            at = first[:, None] * layout.dim + torch.arange(layout.dim)
            u, z = (held[:, i].gather(1, at) for i in range(2))
            off, _ = bounds.softmax(z.T, torch.zeros_like(z.T), u.T[..., None])
            pooled = (z.softmax(0) * u).sum(0)
            made.append(_finished(step, pooled, off, len(made)))
    limits = torch.stack(made) if made else torch.zeros_like(exact)
    return limits + bounds.stored(exact, dtype)


def _finished(step: CompressStep, x: Tensor, off: Tensor, entry: int) -> Tensor:
    weight, dim = step.norm.double(), step.layout.dim
    unit = 1 / (x.square().mean() + step.eps).sqrt()
    y = (x * unit * weight).abs()
    # what is off in all channels together moves the norm by no more than this
    through = off.norm() * unit / dim**0.5
    off = off * unit * weight.abs() + y * (through + bounds.norm_bound(dim) + bounds.rounding(2))
    at = int(step.rows.entry_positions(step.layout.ratio)[entry])
    cos, sin = step.cos[at].double().abs(), step.sin[at].double().abs()
    kept = dim - 2 * len(cos)
    size = y + off
    for rotated in (off, size):
        pairs = rotated[kept:].unflatten(0, (-1, 2) if step.pairing == "interleaved" else (2, -1))  # type: ignore[no-untyped-call]
        axis = 1 if step.pairing == "interleaved" else 0
        a, b = pairs.unbind(axis)
        turned = torch.stack((a * cos + b * sin, b * cos + a * sin), axis)
        rotated[kept:] = turned.flatten()
    return off + bounds.rounding(bounds.AROUND) * size


def compress_bits(op: CompressOp) -> None:
    """Entries of one sequence, in one step, token by token, and cut anywhere beside others."""
    for layout, half, pairing in SHAPES[:4]:
        ratio = layout.ratio
        length = 5 * ratio + 1
        whole = step(layout, half, pairing, [(0, length)], all_kept=True)
        wanted = whole.run(op, whole.rows, whole.fresh())
        for cuts in ([1] * length, [ratio + 1] * length, [1, 2 * ratio, 2, length]):
            made = cut(op, whole, cuts)
            require(torch.equal(made, wanted), f"compress, {layout}: bits depend on the cuts")


def cut(op: CompressOp, whole: CompressStep, cuts: list[int]) -> Tensor:
    """The same entries, by steps of so many tokens; every second one after another's window."""
    (run,), layout = whole.rows.runs, whole.layout
    first = len(whole.store.rows[1])
    room = torch.full((2 * layout.block_size, 2, layout.width), torch.nan)
    view = TailView(torch.cat((whole.fresh().rows, room)), layout)
    blocks = [first // layout.block_size + i for i in range(2)]
    other = CompressRun(blocks, [0, 0], 0, layout.ratio)
    made, start = [], 0
    for i, count in enumerate(cuts):
        stop = min(start + count, run.stop)
        rows: tuple[CompressRun, ...] = (replace(run, start=start, count=stop - start),)
        parts = [each[start:stop] for each in (whole.u, whole.z, whole.cells)]
        if i % 2:
            rows = (other, *rows)
            beside = (*(randn(layout.ratio, layout.width, seed=i + k) for k in (0, 1)),
                      torch.arange(first, first + layout.ratio))  # fmt: skip
            parts = [torch.cat(pair) for pair in zip(beside, parts, strict=True)]
        u, z, cells = parts
        out = replace(whole, u=u, z=z, cells=cells).run(op, CompressRows(rows), view)
        made.append(out[i % 2 :])
        start = stop
        if start == run.stop:
            break
    return torch.cat(made)


def compress_table(op: CompressOp, dtype: torch.dtype = torch.float32) -> None:
    """What a captured graph sees: rows with as many tokens each, padded rows with blocks of
    others."""
    for layout, half, pairing in SHAPES[:4]:
        for each in (1, 3):
            shapes = [(start, each) for start in range(2 * layout.ratio + 1)]
            made = step(layout, half, pairing, shapes, dtype)
            exact, tails = made.exact
            rows, spare = made.rows.runs, 2
            lengths = [p + 1 for run in rows for p in range(run.start, run.stop)]
            table = CompressTable(
                _blocks([run.tails for run in rows], spare),
                torch.tensor(lengths + [0] * (spare * each), dtype=torch.int32),
                each,
            )
            padding = torch.zeros(spare * each, layout.width, dtype=made.u.dtype)
            padded = replace(
                made,
                u=torch.cat((made.u, padding)),
                z=torch.cat((made.z, padding)),
                cells=torch.cat((made.cells, torch.zeros(spare * each).long())),
            )
            view = made.fresh()
            ours = padded.run(op, table, view)
            completed = (table.lengths > 0) & (table.lengths % layout.ratio == 0)
            what = f"compress, a table of {layout}, {each} tokens a row"
            within(what, ours[completed], exact, accepted(made, exact, dtype))
            require(_same_tails(view, tails), f"{what}: tails")
            cells = torch.zeros(len(completed), dtype=torch.long)
            cells[completed] = made.rows.entry_cells(layout.ratio, ENTRY_BLOCK).to(cells.device)
            check_into(op, padded, table, cells, ours, completed)


def _blocks(tables: list[list[int]], spare: int) -> Tensor:
    """Null after the last; padded rows have what another row had."""
    most = max(map(len, tables))
    padded = [ids + [0] * (most - len(ids)) for ids in tables]
    return torch.tensor(padded + padded[:1] * spare, dtype=torch.int32)
