"""Sparse attention: where the bytes of the index cache lie, and its ops against their references,
on mixed steps with shuffled blocks and NaN in every byte that nobody owns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.layout import (
    GROUP,
    INDEX_LAYOUTS,
    STORAGES,
    IndexLayout,
    LatentFp8,
    LatentLayout,
)
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.capabilities import Context, Opaque
from trueline.ops.index_scores import IndexScores
from trueline.ops.index_scores import reference as scores_reference
from trueline.ops.mla_decode import Tiling
from trueline.ops.registry import implementation, runnable
from trueline.ops.sparse_mla import SparseMLA
from trueline.ops.sparse_rows import Run, SparseRows
from trueline.ops.topk import TopK
from trueline.ops.topk import reference as top_reference
from trueline.verify import bounds
from trueline.verify.bounds import require_within
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.verify.ops import attended
from trueline.verify.ops.attention import same_attention
from trueline.verify.ops.data import SMALL, WIDE, Dims, H, randn, shuffled

DIM, INDEX_HEADS, TOPK = 48, 9, 24
BLOCK_SIZES = (1, 2, 16, 64, 128)
DECODE = (TOPK + 1, 0, 150, 1, TOPK, 130, TOPK - 1)
PREFILL = ((1, 5), (TOPK - 4, 30))
"""Lengths of the decode rows; first length and count of the prefill runs."""
FAR = (1100, 700)
"""Decode rows beyond every tile."""
FULL = Tiling(64, full=True)
TILINGS = (FULL, Tiling(1024, full=False), Tiling(16, full=False))
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10, "e4m3": 2.0**-4}
"""Largest error of a stored number, relative to it or to the smallest that is not denormal."""


@dataclass(frozen=True)
class MixedStep:
    """A mixed step: decode rows, then prefill runs, with a cache of each kind that holds them."""

    rows: SparseRows
    keys: list[Tensor]  # of each run's sequence, as written
    index: IndexView
    latent: LatentView
    free: Tensor  # cells that nobody owns

    def cells(self, run: int) -> Tensor:
        each = self.rows.runs[run]
        stop = each.first + each.count - 1
        return torch.tensor(self.latent.layout.cells(each.block_ids, 0, stop), dtype=torch.long)


def layouts(storage: str) -> Iterator[IndexLayout]:
    """All that exist in this storage."""
    for size in BLOCK_SIZES:
        for kind in INDEX_LAYOUTS:
            if kind != "shuffled" or size % GROUP == 0:
                yield IndexLayout(DIM, size, storage, kind)


def mixed_step(
    layout: IndexLayout,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    dims: Dims = SMALL,
    fp8: LatentFp8 | None = None,
    decode: Sequence[int] | None = None,
) -> MixedStep:
    """The same keys in every layout. One position of every longer sequence is a needle."""
    size = layout.block_size
    shapes = [*((length, 1) for length in decode or DECODE), *PREFILL]
    needed = [-(-(first + count - 1) // size) for first, count in shapes]
    num_blocks = sum(needed) + 8
    ids = shuffled(num_blocks - 1, seed)
    runs = tuple(
        Run([ids.pop() for _ in range(count)], *shape)
        for count, shape in zip(needed, shapes, strict=True)
    )
    index = IndexStore(layout, 2, num_blocks)
    latent = LatentStore(LatentLayout(*dims.cached, size, fp8), 2, num_blocks, dtype)
    keys = [numbers(run, layout.dim, seed + 7 * i) for i, run in enumerate(runs)]
    # The second layer: an address that forgets its layer shows.
    step = MixedStep(SparseRows(runs), keys, index.views[1], latent.views[1], torch.empty(0))
    owned = torch.cat([step.cells(i) for i in range(len(runs))])
    unowned = torch.ones(num_blocks * size, dtype=torch.bool)
    unowned[owned] = False
    for store in (index, latent):
        store.poison(range(num_blocks))
    for i, run in enumerate(runs):
        step.index.write(step.cells(i), keys[i])
        rows = numbers(run, dims.width, seed + 7 * i + 1)
        step.latent.write(step.cells(i), rows[:, : dims.latent], rows[:, dims.latent :])
    return MixedStep(step.rows, keys, step.index, step.latent, unowned.nonzero()[:, 0])


def numbers(run: Run, width: int, seed: int) -> Tensor:
    length = run.first + run.count - 1
    made = randn(length, width + 3, seed=seed)[:, 1:-2]  # strided
    made[length // 2 : length // 2 + 1] *= 12
    return made


def queries(
    step: MixedStep, dtype: torch.dtype = torch.float32, heads: int = INDEX_HEADS
) -> tuple[Tensor, Tensor]:
    n = len(step.rows.lengths)
    return randn(n, heads, step.index.layout.dim, seed=5).to(dtype), randn(n, heads, seed=6)


def fail(check: str, what: str) -> None:
    raise CheckFailed(f"{check}: {what}")


def index_cache(subject: Subject) -> None:
    index_bytes_are_described()


def index_bytes_are_described() -> None:
    """What is written is read again, and its bytes lie where the description of the layout says;
    no byte of another cell is written."""
    for storage in STORAGES:
        for layout in layouts(storage):
            what = f"{storage}, {layout.kind}, blocks of {layout.block_size}"
            step = mixed_step(layout)
            for i, run in enumerate(step.rows.runs):
                wanted, cells = step.keys[i], step.cells(i)
                lying = scores_reference.read_keys(step.index, run.block_ids, len(cells))
                read = step.index.read(cells)
                if not torch.equal(read.double(), lying):
                    fail("index cache", f"{what}: what is read is not what lies there")
                _nearest(what, layout, read, wanted)
                if layout.fp8:
                    _scales(what, layout, step.index.scales(cells), wanted)
            if not bool(step.index.read(step.free).isnan().all()):
                fail("index cache", f"{what}: a key that nobody owns was written")


def _nearest(what: str, layout: IndexLayout, read: Tensor, wanted: Tensor) -> None:
    rounding = next(value for name, value in ROUNDING.items() if layout.storage.startswith(name))
    small = wanted.abs().amax(-1, keepdim=True) * 2.0**-10
    if not bool(((read - wanted).abs() <= rounding * wanted.abs().maximum(small)).all()):
        fail("index cache", f"{what}: keys are not those written")


def _scales(what: str, layout: IndexLayout, scales: Tensor, keys: Tensor) -> None:
    """2^ceil(log2(amax / largest)), the largest by the variant's name."""
    largest = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}[layout.storage]
    for scale, key in zip(scales.tolist(), keys, strict=True):
        mantissa, exponent = math.frexp(max(float(key.abs().max()), 1e-4) / largest)
        if scale != math.ldexp(1.0, exponent - (mantissa == 0.5)):
            fail("index cache", f"{what}: a scale of {scale}, largest number {key.abs().max()}")


def sparse_ops(subject: Subject) -> None:
    """Selection, attention and index scores, in every implementation that runs here."""
    for op, check in (
        ("topk", topk),
        ("sparse_mla", sparse_mla),
        ("index_scores", index_scores),  # last: its reference takes longest
    ):
        for name in runnable(op, torch.float32):
            if name != "reference":
                check(implementation(op, name))


def index_scores(
    op: IndexScores[Opaque], dtype: torch.dtype = torch.float32, storages: Iterable[str] = STORAGES
) -> None:
    """Every storage in every layout that it does not refuse; scores have the same bits in all that
    hold the same numbers."""
    for storage in storages:
        scores(op, storage, dtype, list(layouts(storage)))
    if "cpu" in op.capabilities.devices:  # the interpreter is slow
        rows = IndexLayout(DIM, 16, "float32", "rows")
        scores(op, "float32", dtype, [rows], heads=3, decode=FAR)


def scores(
    op: IndexScores[Opaque],
    storage: str,
    dtype: torch.dtype,
    places: Sequence[IndexLayout],
    heads: int = INDEX_HEADS,
    decode: Sequence[int] | None = None,
) -> None:
    """`places`: layouts in this storage, of one width. `decode`: lengths of the decode rows."""
    here = torch.get_default_device()
    # where the reference does not wait for each number
    with torch.device("cpu") if here.type != "cpu" else nullcontext():
        exact, sizes = _exact_scores(storage, dtype, places[0].dim, heads, decode)
    seen = (exact != -math.inf).to(here)
    exact, accepted = exact.to(here)[seen], sizes.to(here)[seen]
    bits = None
    for layout in places:
        if op.capabilities.refusals(Context(dtype=dtype, index=layout)):
            continue
        step = mixed_step(layout, decode=decode)
        q, weights = queries(step, dtype, heads)
        what = f"index_scores, {storage}, {layout.kind}, blocks of {layout.block_size}"
        for tiling in TILINGS if layout.block_size == 2 else (FULL,):
            prepared = op.prepare(step.rows, step.index, tiling, topk=TOPK)
            ours = op.run(q, weights, step.index, prepared)
            if ours.shape != seen.shape or ours.dtype != torch.float32:
                fail("sparse op = reference", f"{what}: {list(ours.shape)} of {ours.dtype}")
            each_within(what, ours[seen], exact, accepted)
            if tiling is not FULL:
                continue
            bits = ours[seen] if bits is None else bits
            if not torch.equal(bits, ours[seen]):
                fail("sparse op = reference", f"{what}: other bits than in another layout")


def each_within(what: str, ours: Tensor, exact: Tensor, accepted: Tensor) -> None:
    """Number by number."""
    parts = (part[..., None] for part in (ours, exact, accepted))
    require_within(f"sparse op = reference: {what}", *parts)


def _exact_scores(
    storage: str, dtype: torch.dtype, dim: int, heads: int, decode: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """And how far from each ours may be."""
    step = mixed_step(IndexLayout(dim, 16, storage, "rows"), decode=decode)
    q, weights = queries(step, dtype, heads)
    given = scores_reference.prepare(step.rows, step.index, FULL, topk=TOPK)
    exact = scores_reference.run(q, weights, step.index, given)
    lengths = step.rows.lengths
    off = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    row = 0
    for run in step.rows.runs:
        stop = run.first + run.count - 1
        keys = scores_reference.read_keys(step.index, run.block_ids, stop)
        at = slice(row, row + run.count)
        off[at, :stop] = score_bound(q[at], weights[at], keys)
        row += run.count
    return exact, off[:, : exact.shape[1]]


def score_bound(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Of index scores, [n, s]: a dot product per head, then their weighted sum, each rounded."""
    squares = torch.einsum("nhd,sd->nhs", q.double().square(), keys.double().square())
    each = bounds.dot_bound(q.shape[-1], squares.sqrt(), q.dtype)
    each = each + bounds.rounding(bounds.AROUND) * squares.sqrt()
    factor = weights.double().abs()[..., None]
    passed = (factor * each).square().sum(1).sqrt()
    return passed + bounds.dot_bound(q.shape[1], (factor.square() * squares).sum(1).sqrt())


def hard_scores(most: int = TOPK, width: int = 97) -> tuple[Tensor, Tensor]:
    """Ties at the edge, few values, all equal, infinities, NaN, both zeros; garbage after a row's
    length. [7 kinds × lengths, width]."""
    lengths = [0, 1, most - 1, most, most + 1, (most + width) // 2, width]
    kinds = [
        randn(width, seed=1),
        (randn(width, seed=2) * 2).round(),
        torch.zeros(width),
        torch.tensor([0.0, -0.0, -1.0])[torch.arange(width) % 3],
        torch.where(randn(width, seed=3) > 0.2, torch.nan, randn(width, seed=4)),
        torch.where(randn(width, seed=5) > 0.3, -torch.inf, randn(width, seed=6)),
        torch.where(randn(width, seed=7) > 1, torch.inf, -randn(width, seed=8).abs()),
    ]
    scores = torch.stack([kind for kind in kinds for _ in lengths])
    at = torch.tensor(lengths * len(kinds))
    garbage = torch.tensor([torch.nan, torch.inf, 1e9])[torch.arange(width) % 3]
    return torch.where(torch.arange(width) >= at[:, None], garbage, scores), at


def topk(op: TopK, _: torch.dtype = torch.float32, most: int = TOPK, width: int = 97) -> None:
    """Scores are float32, whatever is computed in."""
    scores, lengths = hard_scores(most, width)
    wanted = top_reference.run(scores, lengths, most)
    ours = op.run(scores, lengths, most)
    if not torch.equal(ours, wanted):
        row = int((ours != wanted).any(1).nonzero()[0])
        fail("sparse op = reference", f"topk: row {row} chose others")


def selections(step: MixedStep) -> dict[str, Tensor]:
    """Lists of positions for every row: all it sees, some of it, and nothing."""
    lengths = torch.tensor(step.rows.lengths)
    n, longest = len(lengths), int(lengths.max())
    every = torch.arange(longest).expand(n, longest)
    every = torch.where(every < lengths[:, None], every, -1)
    scores = randn(n, longest, seed=11)
    return {
        "all": every,
        "some": top_reference.run(scores, lengths, TOPK),
        "none": torch.full((n, 3), -1),
    }


def sparse_mla(op: SparseMLA[Opaque], dtype: torch.dtype = torch.float32) -> None:
    attend_lists(op, dtype, H, SMALL)


def sparse_mla_wide(op: SparseMLA[Opaque], dtype: torch.dtype = torch.float32) -> None:
    attend_lists(op, dtype, 128, WIDE)


def attend_lists(
    op: SparseMLA[Opaque],
    dtype: torch.dtype,
    heads: int,
    dims: Dims,
    fp8: LatentFp8 | None = None,
) -> None:
    step = mixed_step(IndexLayout(DIM, 16, "float32", "rows"), dtype=dtype, dims=dims, fp8=fp8)
    q = randn(len(step.rows.lengths), heads, dims.width, seed=9).to(dtype)
    for i, (chosen, positions) in enumerate(selections(step).items()):
        scale = dims.scaled(i).scale
        exact = attended.listed(q, step.latent, step.rows, positions, scale)
        for tiling in TILINGS:
            what = f"sparse_mla, {chosen} positions, tiles of {tiling.size}"
            prepared = op.prepare(step.rows, step.latent, tiling)
            ours = op.run(q, step.latent, prepared, positions, softmax_scale=scale)
            same_attention(what, ours, exact, dtype)
