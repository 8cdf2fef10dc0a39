"""Tokens that come one or a few at a time, and every token where tiles are full, have lists of keys
of their own. The tokens of longer runs share the keys they read, some queries at a time. Numbers of
16 bits are multiplied as float32, as in `mla_decode`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.cache.store import LatentView
from trueline.ops.mla_decode import Tiling
from trueline.ops.mla_decode.cpu import BUCKET, FEWEST, INVARIANT_HEADS, MOST, merge, softmax_part
from trueline.ops.sink_attention import IMPLEMENTATIONS, SinkRows, SinkRun, SinkTable
from trueline.ops.sparse_rows import Run, SparseRows, Table

capabilities = IMPLEMENTATIONS["cpu"]

FEW = 8
"""Tokens of a run up to which each reads its keys by itself."""
SCORES = 1 << 21
"""Held at a time, in numbers: they fit a cache."""
QUERIES = (8, 256)
"""Of a run that share keys at a time, at least and at most."""
MASKED = 6
"""Times as many entries as are chosen: up to there queries of a run meet all, and hide the rest."""

Sum = tuple[Tensor, Tensor]
"""Of some keys: the normalised output, and the natural log of the sum of exponents."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What each of some tokens reads of one cache."""

    cells: Tensor  # [g, n] addresses; the zero cell where a token has fewer
    beyond: Tensor  # [g, n]


@dataclass(frozen=True, slots=True)
class Group:
    tokens: Tensor  # [g]
    window: Keys


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens of a run: those of the step from `first` on."""

    first: int
    start: int
    count: int
    oldest: int
    """The position that the first cell is of."""
    window: Tensor  # [cells]
    entries: Tensor  # [cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    groups: tuple[Group, ...]
    shared: tuple[Shared, ...]
    entries: Table | None
    tiling: Tiling
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
    near = Table.of(rows.near(size, window.layout.block_size))
    table = None
    if entries is not None:
        seen = tuple(Run(r.entries, r.start + 1, r.count, ratio) for r in rows.runs)
        table = Table.of(SparseRows(seen))
    single: list[int] = []
    shared: list[Shared] = []
    first = 0
    for run in rows.runs:
        if tiling.full or run.count <= FEW:
            single += range(first, first + run.count)
        else:
            shared.append(_shared(first, run, window, entries, size, ratio))
        first += run.count
    return Prepared(
        groups=tuple(
            _group(torch.tensor(members[i : i + MOST]), near, window, tiling, size)
            for members in _alike(single, table)
            for i in range(0, len(members), MOST)
        ),
        shared=tuple(shared),
        entries=table,
        tiling=tiling,
        size=size,
        ratio=ratio,
    )


def _alike(tokens: list[int], entries: Table | None) -> list[list[int]]:
    """By how many tiles of entries they see, so that padding stays small."""
    if entries is None:
        return [tokens]
    seen = entries.lengths.tolist()
    buckets: dict[int, list[int]] = {}
    for token in tokens:
        buckets.setdefault((-(-seen[token] // BUCKET)).bit_length(), []).append(token)
    return [members for _, members in sorted(buckets.items())]


def _shared(
    first: int, run: SinkRun, window: LatentView, entries: LatentView | None, size: int, ratio: int
) -> Shared:
    stop, oldest = run.start + run.count, max(run.start - size + 1, 0)
    held = window.layout.cells(run.window, oldest, stop)
    made = entries.layout.cells(run.entries, 0, stop // ratio) if entries is not None else []
    cells = (torch.tensor(each, dtype=torch.long) for each in (held, made))
    return Shared(first, run.start, run.count, oldest, *cells)


def _group(tokens: Tensor, table: Table, window: LatentView, tiling: Tiling, size: int) -> Group:
    if tiling.full and len(tokens) < FEWEST:
        tokens = tokens.expand(FEWEST)
    lengths = table.lengths[tokens]
    oldest = (lengths - size).clamp_min(0)
    return Group(tokens, _keys(tokens, oldest, lengths - oldest, table, window, tiling))


def _keys(
    tokens: Tensor, first: Tensor, counts: Tensor, table: Table, view: LatentView, tiling: Tiling
) -> Keys:
    """What stands at first … first + counts - 1, for each token."""
    places = torch.arange(_width(counts, tiling))
    beyond = places >= counts[:, None]
    at = (first[:, None] + places).masked_fill(beyond, 0)
    blocks = table.blocks[table.run[tokens, None], at // view.layout.block_size]
    return Keys(view.layout.cell(blocks, at).masked_fill(beyond, view.zero_cell), beyond)


def _listed(cells: Tensor, counts: Tensor, view: LatentView, tiling: Tiling) -> Keys:
    """Lists [g, k] of cells."""
    width = _width(counts, tiling)
    beyond = torch.arange(width) >= counts[:, None]
    held = pad(cells, (0, max(width - cells.shape[1], 0)))[:, :width]
    return Keys(held.masked_fill(beyond, view.zero_cell), beyond)


def _width(counts: Tensor, tiling: Tiling) -> int:
    most = int(counts.max())
    return -(-most // tiling.size) * tiling.size if tiling.full else most


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
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    heads, full, q = q.shape[1], prepared.tiling.full, q.float()
    if full:
        more = -heads % INVARIANT_HEADS
        q, sinks = pad(q, (0, 0, 0, more)), pad(sinks, (0, more))
    lists = None
    if chosen is not None:
        assert entries is not None, "lists are of entries"
        assert prepared.entries is not None
        lists = Lists(chosen, *prepared.entries.cells(chosen, entries.layout))
    step = Step(window, entries, prepared, softmax_scale, lists)
    for group in prepared.groups:
        total = step.alone(q[group.tokens], group)
        out[group.tokens] = _with_sinks(total, sinks, full)[:, :heads].to(out.dtype)
    for run in prepared.shared:
        for at, total in step.together(q, run):
            out[at] = _with_sinks(total, sinks, full).to(out.dtype)
    return out


def _with_sinks(total: Sum, sinks: Tensor, invariant: bool) -> Tensor:
    """A sink is a key without a value."""
    out, lse = total
    nothing = torch.zeros(1, dtype=out.dtype).expand_as(out)
    return merge(total, (nothing, sinks.float().expand_as(lse)), invariant)[0]


@dataclass(frozen=True, slots=True)
class Lists:
    """Entries that tokens chose."""

    numbers: Tensor  # [n, k]
    cells: Tensor  # [n, k]
    counts: Tensor  # [n]


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's attention. All queries in float32."""

    window: LatentView
    entries: LatentView | None
    prepared: Prepared
    scale: float
    lists: Lists | None

    def alone(self, q: Tensor, group: Group) -> Sum:
        """q [g, heads, width]: each token over keys of its own."""
        total = self._over(q, self.window, group.window, None)
        return total if self.entries is None else self._over_entries(q, group.tokens, total)

    def _over_entries(self, q: Tensor, tokens: Tensor, total: Sum) -> Sum:
        table, tiling = self.prepared.entries, self.prepared.tiling
        assert self.entries is not None
        assert table is not None
        if self.lists is not None:
            cells, counts = self.lists.cells[tokens], self.lists.counts[tokens]
            keys = _listed(cells, counts, self.entries, tiling)
        else:
            counts = table.lengths[tokens]
            keys = _keys(tokens, torch.zeros_like(counts), counts, table, self.entries, tiling)
        return self._over(q, self.entries, keys, total)

    def _over(self, q: Tensor, view: LatentView, keys: Keys, total: Sum | None) -> Sum:
        """With the keys' tiles added to what there is."""
        tiling = self.prepared.tiling
        for start in range(0, keys.cells.shape[1], tiling.size):
            tile = slice(start, start + tiling.size)
            kv = view.gather(keys.cells[:, tile]).float()
            scores = torch.bmm(q, kv.mT).mul_(self.scale)
            scores.masked_fill_(keys.beyond[:, None, tile], float("-inf"))
            part = softmax_part(scores, kv, tiling.full)
            total = part if total is None else merge(total, part, tiling.full)
        assert total is not None
        return total

    def together(self, q: Tensor, run: Shared) -> Iterator[tuple[slice, Sum]]:
        """The tokens of a run, some at a time."""
        least, most = QUERIES
        size = min(max(SCORES // (q.shape[1] * 2 * self.prepared.size), least), most)
        for first in range(0, run.count, size):
            stop = min(first + size, run.count)
            at = slice(run.first + first, run.first + stop)
            positions = torch.arange(run.start + first, run.start + stop)
            total = self._near(q[at], run, positions)
            yield at, self._far(q[at], run, at, positions, total)

    def _near(self, q: Tensor, run: Shared, positions: Tensor) -> Sum:
        oldest = max(int(positions[0]) - self.prepared.size + 1, 0)
        keys = torch.arange(oldest, int(positions[-1]) + 1)
        hidden = (keys > positions[:, None]) | (keys <= positions[:, None] - self.prepared.size)
        kv = self.window.gather(run.window[keys - run.oldest])
        return self._meet(q, kv, hidden)

    def _far(self, q: Tensor, run: Shared, at: slice, positions: Tensor, total: Sum) -> Sum:
        if self.entries is None:
            return total
        seen = (positions + 1) // self.prepared.ratio
        most = int(seen[-1])
        if self.lists is not None and most > MASKED * self.lists.cells.shape[1]:
            return self._over_entries(q, torch.arange(at.start, at.stop), total)
        hidden = torch.arange(most) >= seen[:, None]
        if self.lists is not None:
            hidden = self._unlisted(at, most)
        step = max(SCORES // (len(q) * q.shape[1]), BUCKET)
        for start in range(0, most, step):
            tile = slice(start, min(start + step, most))
            part = self._meet(q, self.entries.gather(run.entries[tile]), hidden[:, tile])
            total = merge(total, part)
        return total

    def _unlisted(self, at: slice, most: int) -> Tensor:
        """[tokens, most] which entries are not in a token's list."""
        assert self.lists is not None
        numbers, counts = self.lists.numbers[at], self.lists.counts[at]
        over = torch.arange(numbers.shape[1]) >= counts[:, None]
        hidden = torch.ones(len(numbers), most + 1, dtype=torch.bool)
        hidden.scatter_(1, numbers.masked_fill(over, most), False)
        return hidden[:, :most]

    def _meet(self, q: Tensor, kv: Tensor, hidden: Tensor) -> Sum:
        """q [n, heads, width] over the same keys [keys, width]; hidden [n, keys]."""
        n, heads, width = q.shape
        kv = kv.float()
        scores = (q.reshape(n * heads, width) @ kv.mT).mul_(self.scale)
        scores.view(n, heads, -1).masked_fill_(hidden[:, None], float("-inf"))
        out, lse = softmax_part(scores[None], kv[None])
        return out.view(n, heads, width), lse.view(n, heads)
