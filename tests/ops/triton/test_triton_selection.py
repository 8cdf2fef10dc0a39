"""The indexer's ops by Triton's kernels, interpreted where there is no GPU: every storage, as the
interpreter has its casts from torch (conftest.py). It has no MMAs of bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.layout import INDEX_LAYOUTS, IndexLayout
from trueline.ops.capabilities import Context
from trueline.ops.index_scores import reference as scores_reference
from trueline.ops.index_scores import triton as scores_op
from trueline.ops.index_write import triton as write_op
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.ops.topk import reference as top_reference
from trueline.ops.topk import triton as top_op
from trueline.verify.ops import OP_CHECKS, randn
from trueline.verify.sparse import FULL, each_within, hard_scores, score_bound

NARROW = torch.float16

# -- index scores ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [pytest.param("float32", torch.float32, marks=pytest.mark.slow), ("float16", NARROW)],
)
def test_index_scores(storage: str, dtype: torch.dtype) -> None:
    OP_CHECKS["index_scores"][0].run(scores_op, dtype, (storage,))


def sequences(
    lengths: list[int], dim: int, storage: str, kind: str = "rows", size: int = 16
) -> tuple[IndexView, list[list[int]]]:
    """One layer's keys, in blocks that lie anywhere; NaN where nobody is."""
    counts = [-(-length // size) for length in lengths]
    store = IndexStore(IndexLayout(dim, size, storage, kind), 2, sum(counts) + 3)
    store.poison(range(sum(counts) + 3))
    ids = (torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)) + 1).tolist()
    view, blocks = store.views[1], []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks.append([ids.pop() for _ in range(count)])
        at = torch.arange(length)
        cells = torch.tensor(blocks[-1])[at // size] * size + at % size
        view.write(cells, randn(length, dim, seed=i + 1))
    return view, blocks


def check_scores(
    ours: Tensor, q: Tensor, weights: Tensor, view: IndexView, rows: SparseRows
) -> None:
    exact = scores_reference.run(q, weights, view, (rows, 0))
    seen = exact != -torch.inf
    accepted, row = torch.zeros_like(exact), 0
    for run in rows.runs:
        stop, at = run.first + run.count - 1, slice(row, row + run.count)
        keys = scores_reference.read_keys(view, run.block_ids, stop)
        accepted[at, :stop] = score_bound(q[at], weights[at], keys)
        row += run.count
    each_within("index_scores", ours[:, : exact.shape[1]][seen], exact[seen], accepted[seen])


@pytest.mark.parametrize(
    ("dtype", "storage", "heads", "dim", "share"),
    [
        (torch.float32, "float32", 1, 5, 4),
        (torch.float32, "float16", 3, 37, 2),
        (torch.float32, "float32", 17, 31, 4),  # too wide to share in float32
        (NARROW, "float32", 4, 16, 4),
        (NARROW, "float16", 64, 128, 4),
        (NARROW, "float16", 33, 128, 8),
    ],
)
def test_scores_of_any_shape(
    dtype: torch.dtype, storage: str, heads: int, dim: int, share: int
) -> None:
    """Strided queries of a mixed step: two decode rows and runs that groups do not divide."""
    view, blocks = sequences([70, 3, 69], dim, storage)
    rows = SparseRows((Run(blocks[1], 3), Run(blocks[2], 69), Run(blocks[0], 60, 11)))
    wide = randn(dim + 1, heads, 13, seed=2).to(dtype)
    q, weights = wide.permute(2, 1, 0)[..., 1:], randn(heads, 13, seed=3).T
    before = [x.clone() for x in (q, weights, view.bytes)]
    prepared = scores_op.prepare(rows, view, FULL, topk=0, share=share)
    check_scores(scores_op.run(q, weights, view, prepared), q, weights, view, rows)
    assert all(map(torch.equal, before, (q, weights, view.bytes)))


@pytest.mark.parametrize("kind", INDEX_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "e4m3fn"])
def test_scores_of_every_storage(storage: str, dtype: torch.dtype, kind: str) -> None:
    """Alone, beside runs, and from a table on the device: scales are read in each."""
    view, blocks = sequences([40, 3, 69], 16, storage, kind)
    single = SparseRows((Run(blocks[2], 69), Run(blocks[1], 3), Run(blocks[0], 40)))
    mixed = SparseRows((Run(blocks[2], 69), Run(blocks[0], 36, 5)))
    for rows, given in ((single, single), (mixed, mixed), (single, Table.of(single))):
        n = len(rows.lengths)
        q, weights = randn(n, 2, 16, seed=2).to(dtype), randn(n, 2, seed=3)
        prepared = scores_op.prepare(given, view, FULL, topk=0)
        check_scores(scores_op.run(q, weights, view, prepared), q, weights, view, rows)


@pytest.mark.parametrize(
    "how", [scores_op.ScoresLaunch(16, 1, 4, 1), scores_op.ScoresLaunch(32, 3, 4, 2)]
)
def test_any_launch(how: scores_op.ScoresLaunch) -> None:
    """Tiles that end within blocks, at them and beyond; more programs than tiles."""
    view, blocks = sequences([130, 65, 64], 16, "float32", size=2)
    rows = SparseRows((Run(blocks[0], 130), Run(blocks[1], 61, 5), Run(blocks[2], 64)))
    q, weights = randn(7, 2, 16, seed=2), randn(7, 2, seed=3)
    prepared = scores_op.prepare(rows, view, FULL, topk=0)
    ours = scores_op.run(q, weights, view, prepared, how)
    assert ours.stride() == (144, 1)  # rows of scores are aligned
    check_scores(ours, q, weights, view, rows)


def test_a_table_of_the_device() -> None:
    """Wider than any row, rows in another order than their runs, null blocks full of NaN."""
    lengths = [1, 40, 17, 33]
    view, blocks = sequences(lengths, 16, "float16", "shuffled")
    most = 5
    table = Table(
        torch.tensor([ids + [0] * (most - len(ids)) for ids in blocks], dtype=torch.int32),
        torch.tensor([3, 1, 0, 2, 0]),
        torch.tensor([33, 40, 1, 17, 0], dtype=torch.int32),
    )
    q, weights = randn(5, 3, 16, seed=2).to(NARROW), randn(5, 3, seed=3)
    prepared = scores_op.prepare(table, view, FULL, topk=0)
    ours = scores_op.run(q, weights, view, prepared)
    assert ours.shape == (5, most * 16)
    rows = SparseRows((Run(blocks[3], 33), Run(blocks[1], 40), Run(blocks[0], 1),
                       Run(blocks[2], 17), Run([], 0)))  # fmt: skip
    check_scores(ours, q, weights, view, rows)


def test_rows_that_select_everything_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is what stands after a row's length."""
    real = Tensor.new_empty

    def marked(self: Tensor, *shape: int, **options: torch.dtype) -> Tensor:
        return real(self, *shape, **options).fill_(7)

    monkeypatch.setattr(Tensor, "new_empty", marked)
    view, blocks = sequences([50, 20], 16, "float32")
    rows = SparseRows((Run(blocks[1], 20), Run(blocks[0], 18, 6), Run(blocks[0], 50)))
    for share in (1, 4):
        prepared = scores_op.prepare(rows, view, FULL, topk=20, share=share)
        ours = scores_op.run(randn(8, 3, 16), torch.ones(8, 3), view, prepared)
        written = (ours != 7).sum(1)
        assert written.tolist() == [0, 0, 0, 0, 21, 22, 23, 50]
        assert bool((ours[4, :21] != 7).all())


def test_a_nan_is_seen_and_stays_where_it_is() -> None:
    view, blocks = sequences([40], 16, "float32")
    rows = SparseRows((Run(blocks[0], 38, 3),))
    view.poison(torch.tensor([blocks[0][1] * 16 + 5]))
    q, weights = randn(3, 3, 16), torch.ones(3, 3)
    ours = scores_op.run(q, weights, view, scores_op.prepare(rows, view, FULL, topk=0))
    seen = torch.arange(40) < torch.tensor([38, 39, 40])[:, None]
    assert (ours.isnan() & seen).nonzero().tolist() == [[0, 21], [1, 21], [2, 21]]


def test_layouts_are_refused_with_the_reason() -> None:
    def why(storage: str, dim: int = 48) -> list[str]:
        layout = IndexLayout(dim, 16, storage, "rows")
        return scores_op.capabilities.refusals(Context(dtype=torch.bfloat16, index=layout))

    assert [why(storage) for storage in ("float32", "bfloat16", "float16", "e4m3fn")] == [[]] * 4
    assert "e4m3fn is" in why("e4m3fnuz")[0]
    assert "multiple of 4 numbers, not of 37" in why("e4m3fn", 37)[0]
    invariant = Context(dtype=torch.float32, batch_invariant=True)
    assert scores_op.capabilities.refusals(invariant)
    view, blocks = sequences([4], 16, "e4m3fnuz")
    with pytest.raises(AssertionError, match="e4m3fnuz"):
        scores_op.prepare(SparseRows((Run(blocks[0], 4),)), view, FULL, topk=0)


def test_a_step_without_rows() -> None:
    view, _ = sequences([4], 16, "float32")
    prepared = scores_op.prepare(SparseRows(()), view, FULL, topk=3)
    ours = scores_op.run(torch.empty(0, 3, 16), torch.empty(0, 3), view, prepared)
    assert ours.shape == (0, 0)


# -- keys and queries ------------------------------------------------------------------


@pytest.mark.parametrize(("storage", "dtype"), [("float32", torch.float32), ("float16", NARROW),
                                                ("float32", NARROW), ("e4m3fn", NARROW),
                                                ("bfloat16", torch.float32)])  # fmt: skip
def test_index_write(storage: str, dtype: torch.dtype) -> None:
    numbers, queries = OP_CHECKS["index_write"]
    numbers.run(write_op, dtype, (storage,))
    queries.run(write_op, dtype)


def test_nothing_to_write() -> None:
    view, _ = sequences([4], 16, "float32")
    none = {
        "cos": torch.empty(0, 4),
        "sin": torch.empty(0, 4),
        "pairing": "interleaved",
        "rope": None,
    }
    empty, one = torch.empty(0, dtype=torch.long), torch.ones(16)
    write_op.run(torch.empty(0, 16), view, empty, norm=one, bias=one, eps=0.1, **none)
    assert write_op.rotate(torch.empty(0, 3, 16), **none).shape == (0, 3, 16)


# -- selection -------------------------------------------------------------------------


def test_topk() -> None:
    OP_CHECKS["topk"][0].run(top_op)


SMALL = top_op.TopkLaunch(64, 16, 4)


@pytest.mark.parametrize(
    ("topk", "how"), [(1, None), (24, SMALL), (60, None), (97, None), (200, None)]
)
def test_selection_is_exact(topk: int, how: top_op.TopkLaunch | None) -> None:
    """Whatever the strides: rows that may be read in fours, rows that may not, columns apart."""
    scores, lengths = hard_scores()
    wanted = top_reference.run(scores, lengths, topk)
    wide = torch.full((len(scores), 108), torch.inf)
    wide[:, 8:105] = scores
    strided = (scores.T.contiguous().T,) if how is None else ()
    for each in (scores, wide[:, 8:105], *strided):
        before = each.clone()
        assert torch.equal(top_op.run(each, lengths, topk, how), wanted)
        assert torch.equal(each.nan_to_num(), before.nan_to_num())


def test_many_rounds() -> None:
    """Ties that cross chunks, in rows of many chunks and of few."""
    scores = (randn(6, 300, seed=4) * 3).round()
    scores[1], scores[2, 50:] = 0.0, -torch.inf
    scores[3] = torch.where(torch.arange(300) % 3 == 0, torch.nan, scores[3])
    scores[4] = torch.arange(300.0)
    lengths = torch.tensor([300, 300, 299, 256, 193, 65])
    for topk in (32,):
        ours = top_op.run(scores, lengths, topk, SMALL)
        assert torch.equal(ours, top_reference.run(scores, lengths, topk))


def test_values_of_every_size() -> None:
    """Neighbours in the last bit, denormals, both infinities."""
    near = torch.tensor([1.0]).view(torch.int32) + torch.arange(60, dtype=torch.int32)
    scores = torch.stack([
        near.view(torch.float32).flip(0),
        -near.view(torch.float32),
        torch.arange(60) * 1e-45,
        torch.tensor([3e38, torch.inf, -torch.inf, -3e38, 1e-40, -1e-40] * 10),
    ])  # fmt: skip
    lengths = torch.tensor([60, 60, 59, 60])
    for topk in (7, 30):
        assert torch.equal(
            top_op.run(scores, lengths, topk), top_reference.run(scores, lengths, topk)
        )


def test_fill_is_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tensor.new_empty

    def garbage(self: Tensor, *shape: int, **options: torch.dtype) -> Tensor:
        return real(self, *shape, **options).fill_(7)

    monkeypatch.setattr(Tensor, "new_empty", garbage)
    wanted = [[-1] * 6, [0, 1, -1, -1, -1, -1], [0, 1, 2, 3, -1, -1]]
    lengths = torch.tensor([0, 2, 4])
    for scores in (torch.full((3, 4), torch.nan), torch.empty(3, 0)):  # or none were made
        assert top_op.run(scores, lengths, 6).tolist() == wanted
    wide = randn(3, 300)
    assert torch.equal(top_op.run(wide, torch.tensor([300, 20, 90]), 24, SMALL),
                       top_reference.run(wide, torch.tensor([300, 20, 90]), 24))  # fmt: skip
    assert top_op.run(torch.empty(0, 0), torch.empty(0, dtype=torch.long), 4).shape == (0, 4)


def test_rounds_get_shorter() -> None:
    assert top_op.launch(16, 160_000, 2048, 132).chunk == 16384
    assert top_op.launch(16, 8192, 2048, 132) == top_op.TopkLaunch(16384, 4096, 8)
    assert top_op.launch(1024, 8192, 2048, 132) == top_op.TopkLaunch(16384, 4096, 4)
    assert top_op.launch(16, 3000, 2048, 132) == top_op.TopkLaunch(4096, 4096, 4)
    assert top_op.launch(1, 10**6, 40_000, 132).chunk >= 80_000
