"""Attention over the window and compressed entries against its float64 reference: positions around
the window's edge and around windows of every ratio, lists that end early, sinks of any size, and
NaN in every row that a token may not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.capabilities import Opaque
from trueline.ops.mla_decode import Tiling
from trueline.ops.sink_attention import SinkAttention, SinkRows, SinkRun, SinkTable
from trueline.ops.sink_attention import reference as sink_reference
from trueline.verify import bounds
from trueline.verify.ops.data import randn, require, shuffled, within

SinkOp = SinkAttention[Opaque]

FULL = Tiling(64, full=True)
TILINGS = (FULL, Tiling(1024, full=False), Tiling(16, full=False))
SCALE = 0.19
NOPE, ROPE, HEADS = 37, 10, 5


@dataclass(frozen=True)
class Shape:
    size: int
    """Of the window."""
    ratio: int
    window_block: int = 8
    entry_block: int = 3
    topk: int = 0


SHAPES = (Shape(7, 4), Shape(7, 4, topk=5), Shape(16, 3, 16, 1, topk=3), Shape(5, 0, 4),
          Shape(1, 1, 1, 7), Shape(130, 2, 64, 16))  # fmt: skip


@dataclass(frozen=True)
class SinkStep:
    shape: Shape
    rows: SinkRows
    window: LatentView
    entries: LatentView | None
    chosen: Tensor | None
    num_tokens: int

    def run(
        self, op: SinkOp, q: Tensor, sinks: Tensor, tiling: Tiling, scale: float = SCALE
    ) -> Tensor:
        return attend(op, self, self.rows, q, sinks, tiling, self.chosen, scale)


def attend(
    op: SinkOp, step: SinkStep, rows: SinkRows | SinkTable, q: Tensor, sinks: Tensor,
    tiling: Tiling, chosen: Tensor | None, scale: float = SCALE,
) -> Tensor:  # fmt: skip
    size, ratio = step.shape.size, step.shape.ratio
    prepared = op.prepare(rows, step.window, step.entries, tiling, size=size, ratio=ratio)
    given = q, step.window, step.entries, prepared
    return op.run(*given, sinks=sinks, softmax_scale=scale, chosen=chosen)


def spans(shape: Shape) -> list[tuple[int, int]]:
    """Start and count: single tokens around the edges of the window and of windows of a ratio, a
    few tokens, and runs that share keys."""
    size, ratio = shape.size, max(shape.ratio, 1)
    edges = {0, size - 1, size, size + 1, *(k * ratio + i for k in (1, 2, 5) for i in (-1, 0, 1))}
    single = [(position, 1) for position in sorted(edges) if position >= 0]
    return [*single, (0, 11), (2 * size + ratio, 3), (size - 1, 2 * ratio + 9), (61, 17)]


def sink_step(
    shape: Shape,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (NOPE, ROPE),
) -> SinkStep:
    """The second layer of each store: an address that forgets its layer shows."""
    size, ratio = shape.size, shape.ratio
    stops = [start + count for start, count in shapes]
    oldest = [max(start - size + 1, 0) for start, _ in shapes]
    near, window = _cache(LatentLayout(*dims, shape.window_block), oldest, stops, dtype, seed=1)
    entries, far = None, [list[int]() for _ in shapes]
    if ratio:
        layout = LatentLayout(*dims, shape.entry_block)
        far, entries = _cache(layout, [0] * len(stops), [s // ratio for s in stops], dtype, seed=2)
    runs = tuple(SinkRun(a, b, *s) for a, b, s in zip(near, far, shapes, strict=True))
    lengths = [start + i + 1 for start, count in shapes for i in range(count)]
    chosen = None
    if shape.topk:
        listed = [_list(length // ratio, shape.topk, i) for i, length in enumerate(lengths)]
        chosen = torch.tensor([[0, *each, 0] for each in listed])[:, 1:-1]  # strided
    return SinkStep(shape, SinkRows(runs), window, entries, chosen, len(lengths))


def _cache(
    layout: LatentLayout, oldest: list[int], stops: list[int], dtype: torch.dtype, seed: int
) -> tuple[list[list[int]], LatentView]:
    """Rows oldest … stop of each sequence, a needle among them; null blocks before them."""
    size = layout.block_size
    num_blocks = sum(-(-stop // size) for stop in stops) + 4
    ids = shuffled(num_blocks - 1, seed)
    store = LatentStore(layout, 2, num_blocks, dtype)
    store.poison(range(num_blocks))
    view, tables = store.views[1], []
    for i, (first, stop) in enumerate(zip(oldest, stops, strict=True)):
        mine = [ids.pop() for _ in range(-(-stop // size))]
        numbers = randn(stop - first, layout.width, seed=100 * seed + i)
        numbers[len(numbers) // 2 :: 29] *= 5
        cells = torch.tensor(layout.cells(mine, first, stop), dtype=torch.long)
        view.write(cells, numbers[:, : layout.latent], numbers[:, layout.latent :])
        mine[: first // size] = [0] * (first // size)
        tables.append(mine)
    return tables, view


def _list(visible: int, width: int, seed: int) -> list[int]:
    """Entries in any order, of all lengths, ended by -1 and then by what nobody may look at."""
    order = [number - 1 for number in shuffled(visible, seed)][: width - seed % 3]
    order = [] if seed % 7 == 6 else order
    return [*order, -1, *[1 << 40] * width][:width]


def head_sinks(heads: int) -> Tensor:
    """As large as scores, much larger, much smaller, and of no weight at all."""
    return torch.tensor([0.3, 30.0, -1e30, -2.0, -torch.inf, 2.5, 1e4])[torch.arange(heads) % 7]


def sink_attention(op: SinkOp, dtype: torch.dtype = torch.float32) -> None:
    tilings = TILINGS if op.capabilities.batch_invariant else TILINGS[1:2]
    for i, shape in enumerate(SHAPES):
        step, scale = sink_step(shape, spans(shape), dtype), SCALE * (1 + i / 8)
        compare(op, f"sink_attention, {shape}", step, HEADS, dtype, tilings, scale)
    if "cpu" in op.capabilities.devices:  # the interpreter is slow
        step = sink_step(FAR, [(2900, 1), (2890, 7)], dtype)
        compare(op, f"sink_attention, {FAR}, far", step, 2, dtype, tilings)


WIDE_SHAPES = ((Shape(128, 4, 64, 64, 64), 64), (Shape(128, 128, 64, 2), 16),
               (Shape(128, 0, 64), 40))  # fmt: skip
"""And heads."""
FAR = Shape(7, 2, 16, 16)
"""Where contexts have more entries than any tile, and than entries are added up at a time."""
WIDE_DIMS = (448, 64)


def sink_attention_wide(
    op: SinkOp,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[Shape, int]] = WIDE_SHAPES,
    dims: tuple[int, int] = WIDE_DIMS,
    scale: float = 0.044,
) -> None:
    for shape, heads in shapes:
        edge = shape.size
        spans = [(0, 1), (edge - 1, 1), (edge, 1), (4 * edge - 1, 1), (700, 1),
                 (max(edge - 8, 0), 20), (500, 3)]  # fmt: skip
        step = sink_step(shape, spans, dtype, dims)
        compare(op, f"sink_attention, {shape}, {dims}", step, heads, dtype, TILINGS[1:2], scale)


def compare(
    op: SinkOp, what: str, step: SinkStep, heads: int, dtype: torch.dtype,
    tilings: Sequence[Tiling], scale: float = SCALE,
) -> None:  # fmt: skip
    width = step.window.layout.width
    q = randn(step.num_tokens, heads, width + 3, seed=9).to(dtype)[..., 1:-2]  # strided
    sinks = head_sinks(heads)
    exact, limit = reference(step, q, sinks, scale)
    for tiling in tilings:
        ours = step.run(op, q, sinks, tiling, scale)
        require(ours.dtype == dtype, f"{what}: {ours.dtype} for {dtype}")
        within(f"{what}, tiles of {tiling.size}", ours, exact, limit[..., None])


def reference(step: SinkStep, q: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """And the bounds of each row's norm, [n, heads]: a sink is a key whose value is zero."""
    prepared = sink_reference.Prepared(step.rows, step.shape.size, step.shape.ratio)
    exact = sink_reference.run(
        q.double(), step.window, step.entries, prepared,
        sinks=sinks, softmax_scale=scale, chosen=step.chosen,
    )  # fmt: skip
    limits = []
    finite = sinks.double().clamp_min(-1e4)[:, None]  # which weighs nothing either
    seen = sink_reference.seen(step.window, step.entries, prepared, step.chosen)
    for row, keys in zip(q.double(), seen, strict=True):
        off = scale * bounds.gemm(row, keys, q.dtype)
        scores = torch.cat((scale * (row @ keys.mT), finite), dim=1)
        off = torch.cat((off, torch.zeros_like(finite)), dim=1)
        values = torch.cat((keys, torch.zeros_like(keys[:1])))
        limits.append(bounds.softmax(scores, off, values, dtype=q.dtype)[0])
    tiny = torch.finfo(q.dtype).tiny  # of results next to zero
    return exact, torch.stack(limits) + tiny * q.shape[-1]


def sink_attention_bits(op: SinkOp) -> None:
    """A token's bits: alone, among others, in a run, and with a list of all that it sees."""
    for shape in (Shape(7, 4, topk=90), Shape(70, 2, 8, 5)):
        spans = [(0, 90), (150, 1), (64, 40), (3, 1)]
        step = sink_step(shape, spans)
        q, sinks = randn(step.num_tokens, HEADS, NOPE + ROPE, seed=3), head_sinks(HEADS)
        whole = attend(op, step, step.rows, q, sinks, FULL, None)
        lengths = [start + i + 1 for start, count in spans for i in range(count)]
        every = [list(range(length // shape.ratio)) for length in lengths]
        most = max(map(len, every)) + 2
        lists = torch.tensor([each + [-1] * (most - len(each)) for each in every])
        made = attend(op, step, step.rows, q, sinks, FULL, lists)
        require(torch.equal(made, whole), f"sink_attention, {shape}: bits of a list of all entries")
        singles = [
            SinkRun(run.window, run.entries, run.start + i)
            for run in step.rows.runs
            for i in range(run.count)
        ]
        for some in ([5], [131, 0, 89], [*range(40, 100)], [90, 91, 129, 130]):
            rows = SinkRows(tuple(singles[i] for i in some))
            made = attend(op, step, rows, q[some], sinks, FULL, None)
            require(torch.equal(made, whole[some]), f"sink_attention, {shape}: bits of the batch")


def sink_table(op: SinkOp, dtype: torch.dtype = torch.float32) -> None:
    """What a captured graph sees: rows with as many tokens each, padded rows with blocks of others,
    tables with room to spare."""
    for shape in SHAPES[:4]:
        for each in (1, 3):
            starts = (0, shape.size - 1, shape.size, 40, 2 * max(shape.ratio, 1))
            step = sink_step(shape, [(start, each) for start in starts], dtype)
            n, spare = step.num_tokens, 2 * each
            q = randn(n + spare, HEADS, NOPE + ROPE, seed=9).to(dtype)
            exact, limit = reference(step, q[:n], head_sinks(HEADS), SCALE)
            lengths = [run.start + i + 1 for run in step.rows.runs for i in range(each)]
            table = SinkTable(
                _blocks([run.window for run in step.rows.runs]),
                _blocks([run.entries for run in step.rows.runs]) if shape.ratio else None,
                torch.tensor(lengths + [0] * spare, dtype=torch.int32),
                each,
            )
            chosen = step.chosen
            if chosen is not None:
                chosen = torch.cat((chosen, torch.full((spare, chosen.shape[1]), -1)))
            ours = attend(op, step, table, q, head_sinks(HEADS), TILINGS[1], chosen)
            what = f"sink_attention, a table, {shape}, {each} tokens a row"
            within(what, ours[:n], exact, limit[..., None])
            require(bool((ours[n:] == 0).all()), f"{what}: a padded row is not zero")


def _blocks(tables: list[list[int]]) -> Tensor:
    """Null after the last; two padded rows have what another row had."""
    most = max(map(len, tables)) + 3
    padded = [ids + [0] * (most - len(ids)) for ids in tables]
    return torch.tensor(padded + padded[:1] * 2, dtype=torch.int32)
