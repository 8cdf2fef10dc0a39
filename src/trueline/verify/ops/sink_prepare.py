"""Norms and rotations around compressed attention, against their float64 reference: rows so small
that a norm's eps counts, columns of wider projections, cells in any order of a cache of NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.ops.rope import cpu as rope
from trueline.ops.sink_prepare import Rotation, SinkPrepare
from trueline.ops.sink_prepare import reference as exactly
from trueline.spec.rope import Pairing
from trueline.verify.bounds import AROUND, norm_bound, rounding
from trueline.verify.ops.basic import ROTATION
from trueline.verify.ops.data import randn, require, rounded_alike, shuffled, within

BLOCK = 4


@dataclass(frozen=True)
class Case:
    what: str
    projected: Tensor
    rank: int
    rope: Rotation
    heads: int

    @property
    def width(self) -> int:
        return self.projected.shape[1] - self.rank

    @property
    def eps(self) -> float:
        """Another in each case."""
        return 0.2 / self.width

    @property
    def norms(self) -> tuple[Tensor, Tensor]:
        made = (0.5 + randn(size, seed=size).abs() for size in (self.rank, self.width))
        q_norm, kv_norm = (each.to(self.projected.dtype) for each in made)
        return q_norm, kv_norm

    @property
    def q(self) -> Tensor:
        """[n, heads, width], strided."""
        drawn = 8 * randn(len(self.projected), self.heads, self.width + 3, seed=7)
        drawn[:, 0] *= 1e-2
        return drawn.to(self.projected.dtype)[..., 1:-2]

    def window(self) -> tuple[LatentView, Tensor]:
        """Of NaN, and where rows go."""
        tokens, dim = len(self.projected), 2 * self.rope.cos.shape[1]
        layout = LatentLayout(self.width - dim, dim, BLOCK, None)
        store = LatentStore(layout, 2, tokens + 2, self.projected.dtype)
        store.poison(range(tokens + 2))
        return store.views[1], torch.tensor(shuffled(tokens * BLOCK, 3)[:tokens])

    def written(self, op: SinkPrepare, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The latent, and all rows of the window."""
        view, cells = self.window()
        latent = op.write(
            self.projected[rows],
            view,
            cells[rows],
            norms=self.norms,
            eps=self.eps,
            rope=self.turn(rows),
            rms_norm=rms_norm,
        )
        return latent, view.rows

    def turn(self, rows: slice = slice(None)) -> Rotation:
        return self.rope._replace(cos=self.rope.cos[rows], sin=self.rope.sin[rows])

    def queries(self, op: SinkPrepare, rows: slice = slice(None)) -> Tensor:
        return op.queries(self.q[rows], eps=self.eps, rope=self.turn(rows), rms_norm=rms_norm)


Shape = tuple[int, int, int, int, int, Pairing]
SHAPES: tuple[Shape, ...] = (
    (1, 37, 26, 5, 3, "interleaved"),
    (4, 16, 24, 4, 6, "half-split"),
    (9, 5, 14, 1, 7, "interleaved"),
    (3, 70, 11, 17, 2, "interleaved"),
)
"""Tokens, width of the query latent and of a row, heads, half of the rotated channels."""


def cases(dtype: torch.dtype, shapes: Sequence[Shape] = SHAPES) -> Iterator[Case]:
    for n, rank, width, heads, half, pairing in shapes:
        whole = 8 * randn(n, rank + width + 5, seed=n)
        whole[1::3] *= 1e-2
        angles = 100 * randn(n, half, seed=4)
        turned = Rotation(1.3 * angles.cos(), 1.3 * angles.sin(), pairing, rope)
        what = f"{n} tokens, {rank} and {width} channels, {2 * half} of them {pairing}"
        yield Case(what, whole.to(dtype)[:, 2:-3], rank, turned, heads)


def sink_prepare(
    op: SinkPrepare, dtype: torch.dtype = torch.float32, shapes: Sequence[Shape] = SHAPES
) -> None:
    for case in cases(dtype, shapes):
        what, before = f"sink_prepare, {case.what}", case.projected.clone()
        (ours, rows), (exact, wanted) = case.written(op), case.written(exactly)
        require(torch.equal(case.projected, before), f"{what}: writes its input")
        _same(f"{what}: latent", ours, exact)
        there = ~wanted.isnan()
        require(torch.equal(there, ~rows.isnan()), f"{what}: other rows are written")
        _same(f"{what}: rows", rows[there].view(-1, case.width), wanted[there].view(-1, case.width))
        q, exact = case.q, case.queries(exactly)
        _same(f"{what}: queries", case.queries(op), exact)
        for back in (False, True):
            turned = exactly.rotate(q.clone(), rope=case.rope, back=back)
            _same(f"{what}: back {back}", op.rotate(q.clone(), rope=case.rope, back=back), turned)


def _same(what: str, ours: Tensor, wanted: Tensor) -> None:
    require(ours.dtype == wanted.dtype, f"{what}: in {ours.dtype}")
    if wanted.dtype == torch.float32:
        # a rotation may take all of a number away, not of its row
        most = 2 * wanted.double().abs().amax(-1, keepdim=True)
        relative = norm_bound(wanted.shape[-1]) + rounding(ROTATION + AROUND)
        within(what, ours, wanted, (relative * most).expand_as(wanted))
    else:
        rounded_alike(what, ours, wanted)


def bits(op: SinkPrepare) -> None:
    """Of a token, whoever stands beside it."""
    for case in cases(torch.float32):
        (latent, rows), queries = case.written(op), case.queries(op)
        _, cells = case.window()
        for i, cell in enumerate(cells.tolist()):
            alone = slice(i, i + 1)
            mine, row = case.written(op, alone)
            what = f"sink_prepare, {case.what}: token {i} alone"
            require(torch.equal(mine[0], latent[i]), f"{what}: latent")
            require(torch.equal(row[cell], rows[cell]), f"{what}: row")
            require(torch.equal(case.queries(op, alone)[0], queries[i]), f"{what}: queries")
