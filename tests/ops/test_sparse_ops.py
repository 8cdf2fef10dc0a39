"""The ops of sparse attention against their float64 references: mixed steps, ragged lengths around
top-k, shuffled blocks, strided inputs, NaN in every byte that is not owned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from implementations import every, runnable, with_threads
from spread import diagonal
from trueline.cache.index import IndexStore, IndexView
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.lightning import LightningState
from trueline.cache.kinds.tails import TailsAll
from trueline.cache.kinds.window import Window
from trueline.cache.layout import STORAGES, IndexLayout, LatentLayout
from trueline.cache.layout import cells as cells_of
from trueline.cache.store import LatentStore
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.ops.capabilities import Context
from trueline.ops.index_scores import reference as scores_reference
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.registry import OPS, capabilities, implementation
from trueline.ops.registry import runnable as names
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.ops.topk import reference as top_reference
from trueline.plan.plan import make_plan
from trueline.plan.select import choose_op
from trueline.verify.bounds import gemm, softmax
from trueline.verify.ops import attended
from trueline.verify.ops.attention import same_attention
from trueline.verify.ops.data import H, L, R, randn, within
from trueline.verify.sparse import (
    DIM,
    FULL,
    TILINGS,
    TOPK,
    MixedStep,
    each_within,
    hard_scores,
    mixed_step,
    queries,
    score_bound,
    selections,
)


def fast(op: str) -> list[str]:
    return [name for name in names(op, torch.float32) if name != "reference"]


PLAIN = IndexLayout(DIM, 16, "float32", "rows")
BIG = 1 << 40


def score(
    op: Any, step: MixedStep, rows: SparseRows, q: Tensor, w: Tensor, topk: int = 0
) -> Tensor:
    out: Tensor = op.run(q, w, step.index, op.prepare(rows, step.index, FULL, topk=topk))
    return out


# -- index scores ----------------------------------------------------------------------


def one_sequence(
    length: int, dim: int, storage: str = "float32", kind: str = "rows", seed: int = 0
) -> tuple[IndexView, list[int], Tensor]:
    """A view, its block ids and the keys of one sequence in blocks of 16."""
    store = IndexStore(IndexLayout(dim, 16, storage, kind), 1, length // 16 + 3)
    store.poison(range(length // 16 + 3))
    order = torch.randperm(length // 16 + 2, generator=torch.Generator().manual_seed(seed)) + 1
    at = torch.arange(length)
    keys = randn(length, dim, seed=seed + 1)
    store.views[0].write(order[at // 16] * 16 + at % 16, keys)
    return store.views[0], order.tolist(), keys


@every("index_scores")
@pytest.mark.parametrize("storage", ["float32", "e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 5), (3, 16), (4, 37), (5, 128), (16, 13), (17, 31)])
def test_scores_of_any_shape(module: str, storage: str, heads: int, dim: int) -> None:
    op = runnable("index_scores", module)
    view, blocks, _ = one_sequence(70, dim, storage)
    rows = SparseRows((Run(blocks, 66, 5),))
    q = randn(dim + 1, heads, 5, seed=2).permute(2, 1, 0)[..., 1:]  # strided
    weights = randn(heads, 5, seed=3).T
    before = [x.clone() for x in (q, weights, view.bytes)]
    exact = scores_reference.run(q, weights, view, (rows, 0))
    held = scores_reference.read_keys(view, blocks, 70)
    accepted = score_bound(q, weights, held)
    for tiling in TILINGS:
        ours = op.run(q, weights, view, op.prepare(rows, view, tiling, topk=0))
        assert torch.equal(ours == -torch.inf, exact == -torch.inf)
        seen = exact != -torch.inf
        each_within("index_scores, any shape", ours[seen], exact[seen], accepted[seen])
    assert all(map(torch.equal, before, (q, weights, view.bytes)))


@every("index_scores")
def test_every_code_is_read_alike(module: str) -> None:
    """Sixteen tokens with all 256 bytes between them, one channel asked for at a time."""
    op = runnable("index_scores", module)
    for storage in ("e4m3fn", "e4m3fnuz"):
        store = IndexStore(IndexLayout(16, 16, storage, "rows"), 1, 2)
        view = store.views[0]
        view.write(torch.arange(16, 32), torch.ones(16, 16))
        at = view.layout.key_start(torch.arange(16, 32))[:, None] + torch.arange(16)
        view.bytes[at] = torch.arange(256, dtype=torch.uint8).view(16, 16)
        rows = SparseRows((Run([1], 16), Run([1], 16)))
        exact = scores_reference.read_keys(view, [1], 16)
        assert int(exact.isnan().sum()) == (2 if storage == "e4m3fn" else 1)
        for channel in range(16):
            q = torch.zeros(2, 1, 16)
            q[0, 0, channel], q[1, 0, channel] = 1, -1
            # a key with a NaN anywhere has no score: zero times NaN is none
            scores = score(op, replace(mixed_step(PLAIN), index=view), rows, q, torch.ones(2, 1))
            good = ~exact.isnan().any(1)
            wanted = torch.stack([exact[:, channel].relu(), (-exact[:, channel]).relu()])
            assert torch.equal(scores[:, good].double(), wanted[:, good])
            assert scores[:, ~good].isnan().all()


def test_native_scores_see_what_a_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were rows counted in C++ again, a fault in the count would write past the scores' end."""
    op = runnable("index_scores", "native")
    view, blocks, _ = one_sequence(70, 16)
    rows = SparseRows((Run(blocks, 66, 5),))
    monkeypatch.setattr(Run, "length", lambda self, row: 60 + row)
    ours = op.run(randn(5, 3, 16), randn(5, 3), view, op.prepare(rows, view, FULL, topk=0))
    assert ours.shape == (5, 64)
    assert (ours != -torch.inf).sum(1).tolist() == [60, 61, 62, 63, 64]


@every("index_scores")
@pytest.mark.parametrize("storage", ["float32", "e4m3fn"])
def test_score_bits_depend_on_row_and_key_alone(module: str, storage: str) -> None:
    """Other rows, other cuts of a prefill, other heads' company: the same bits."""
    op = runnable("index_scores", module)
    step = mixed_step(IndexLayout(DIM, 2, storage, "planar"))
    q, weights = queries(step)
    whole = score(op, step, step.rows, q, weights)
    runs, starts = step.rows.runs, [0]
    for run in runs:
        starts.append(starts[-1] + run.count)
    for some in ([2], [5, 0], [8, 3, 7], [7, 8, 5, 2]):
        part = SparseRows(tuple(runs[i] for i in some))
        at = [row for i in some for row in range(starts[i], starts[i + 1])]
        ours = score(op, step, part, q[at], weights[at])
        assert torch.equal(ours, whole[at, : ours.shape[1]])
    last = runs[8]
    for cut in (1, 7, 29):
        halves = SparseRows((Run(last.block_ids, last.first, cut),
                             Run(last.block_ids, last.first + cut, last.count - cut)))  # fmt: skip
        ours = score(op, step, halves, q[starts[8] :], weights[starts[8] :])
        assert torch.equal(ours, whole[starts[8] :, : ours.shape[1]])


@every("index_scores")
@pytest.mark.parametrize("topk", [0, 64, 65, 100])
def test_scores_around_the_edges_of_tiles(module: str, topk: int) -> None:
    """One run of all lengths up to 130, and every length alone."""
    op = runnable("index_scores", module)
    view, blocks, keys = one_sequence(130, 16)
    q, weights = randn(130, 3, 16, seed=2), randn(130, 3, seed=3)
    run = Run(blocks, 1, 130)
    ours = op.run(q, weights, view, op.prepare(SparseRows((run,)), view, FULL, topk=topk))
    dots = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu()
    exact = torch.einsum("th,ths->ts", weights.double(), dots)
    seen = torch.ones(130, 130).tril().bool()
    seen[:topk] = False
    assert torch.equal(ours != -torch.inf, seen)
    accepted = score_bound(q, weights, keys)
    each_within("index_scores, edges of tiles", ours[seen], exact[seen], accepted[seen])
    alone = SparseRows(tuple(Run(blocks, length) for length in range(1, 131)))
    assert torch.equal(op.run(q, weights, view, op.prepare(alone, view, FULL, topk=topk)), ours)


def test_full_tiles_make_products_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may forgive what another does not: bits of GEMMs of another shape."""
    real, shapes = torch.bmm, []

    def watched(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((len(a), a.shape[1:], b.shape[1:]))
        return real(a, b)

    monkeypatch.setattr(torch, "bmm", watched)
    step = mixed_step(PLAIN)
    score(implementation("index_scores", "cpu"), step, step.rows, *queries(step))
    assert min(rows for rows, *_ in shapes) == 2
    assert {tuple(rest) for _, *rest in shapes} == {((16, DIM), (DIM, 64))}


@every("index_scores")
def test_threads_do_not_change_scores(module: str) -> None:
    op = runnable("index_scores", module)
    step = mixed_step(PLAIN)
    q, weights = queries(step)
    first, *others = with_threads(lambda: score(op, step, step.rows, q, weights))
    for other in others:
        assert torch.equal(first, other)


@every("index_scores")
@pytest.mark.parametrize("topk", [0, 1, TOPK - 1, TOPK, 149, 150, 1000])
def test_rows_that_select_everything_are_not_scored(module: str, topk: int) -> None:
    op = runnable("index_scores", module)
    step = mixed_step(PLAIN)
    q, weights = queries(step)
    whole = score(op, step, step.rows, q, weights)
    ours = score(op, step, step.rows, q, weights, topk)
    lengths = torch.tensor(step.rows.lengths)
    scored = lengths > topk
    assert ours.shape == (len(lengths), int(lengths[scored].max()) if scored.any() else 0)
    assert torch.equal(ours[scored], whole[scored, : ours.shape[1]])
    assert (ours[~scored] == -torch.inf).all()


@every("index_scores")
def test_a_nan_is_seen_and_stays_where_it_is(module: str) -> None:
    op = runnable("index_scores", module)
    step = mixed_step(PLAIN)
    q, weights = queries(step)
    clean = score(op, step, step.rows, q, weights)
    step.index.poison(step.cells(2)[[77]])
    ours = score(op, step, step.rows, q, weights)
    assert ours[2, 77].isnan()
    assert int(ours.isnan().sum()) == 1
    keep = ~ours.isnan()
    assert torch.equal(ours[keep], clean[keep])


@pytest.mark.parametrize("op", ["index_scores", "sparse_mla", "topk"])
def test_a_step_without_rows(op: str) -> None:
    step, none = mixed_step(PLAIN), SparseRows(())
    for name in (*fast(op), "reference"):
        module = implementation(op, name)
        if op == "index_scores":
            prepared = module.prepare(none, step.index, FULL, topk=TOPK)
            out = module.run(torch.empty(0, 3, DIM), torch.empty(0, 3), step.index, prepared)
            assert out.shape == (0, 0)
        elif op == "topk":
            empty = torch.empty(0, dtype=torch.long)
            assert module.run(torch.empty(0, 0), empty, 4).shape == (0, 4)
        else:
            prepared, nothing = module.prepare(none, step.latent, FULL), torch.empty(0, 4).long()
            q = torch.empty(0, H, L + R)
            out, lse = module.run(q, step.latent, prepared, nothing, softmax_scale=0.2)
            assert (out.shape, lse.shape) == ((0, H, L), (0, H))


def test_layouts_are_refused_with_the_reason() -> None:
    for storage in STORAGES:
        layout = IndexLayout(DIM, 16, storage, "rows")
        context = Context(dtype=torch.float32, index=layout)
        why = capabilities("index_scores", "native").refusals(context)
        narrow = storage in ("bfloat16", "float16")
        assert (f"reads float32 and fp8 keys, not {storage}" in why) == narrow
        assert not capabilities("index_scores", "cpu").refusals(context)
    if "native" in fast("index_scores"):
        step = mixed_step(IndexLayout(DIM, 16, "bfloat16", "rows"))
        native = implementation("index_scores", "native")
        with pytest.raises(AssertionError, match="not bfloat16"):
            native.prepare(step.rows, step.index, FULL, topk=0)


@pytest.mark.parametrize("storage", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_fp8_keys_select_what_unquantised_keys_select(storage: str, power_of_two: bool) -> None:
    """Keys as a LayerNorm leaves them, with channels of unequal strength and topics that tokens
    share; queries near some of them; top quarter of the context. Needles are few and strong."""
    n, context, heads, dim, topk = 12, 2048, 16, 128, 512
    topics = randn(24, dim, seed=1)
    keys = topics[torch.arange(context) * 7 % 24] + randn(context, dim, seed=2)
    strength = 0.5 + randn(dim, seed=3).abs()
    keys = torch.nn.functional.layer_norm(keys, (dim,)) * strength + 0.2 * randn(dim, seed=4)
    q = 2 * topics[torch.arange(n * heads) * 5 % 24].view(n, heads, dim) + randn(
        n, heads, dim, seed=5
    )
    weights = randn(n, heads, seed=6).abs()
    needles = [(t * 131 + 40) % context for t in range(n)]
    for t, s in enumerate(needles):
        keys[s] = 3 * q[t].mean(0)
    chosen = {}
    for each in ("float32", storage):
        store = IndexStore(IndexLayout(dim, 64, each, "planar", power_of_two), 1, context // 64)
        view = store.views[0]
        view.write(torch.arange(context), keys)
        rows = SparseRows(tuple(Run(list(range(context // 64)), context) for _ in range(n)))
        op = implementation("index_scores", fast("index_scores")[0])
        scores = op.run(q, weights, view, op.prepare(rows, view, FULL, topk=topk))
        lengths = torch.tensor(rows.lengths)
        chosen[each] = top_reference.run(scores, lengths, topk)
    sets = {name: [set(row) for row in found.tolist()] for name, found in chosen.items()}
    shared = [len(a & b) / topk for a, b in zip(*sets.values(), strict=True)]
    assert sum(shared) / n >= 0.97
    assert min(shared) < 1  # or the data shows nothing
    assert all(s in found for each in sets.values() for s, found in zip(needles, each, strict=True))


@given(
    shapes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=6),
    limit=st.integers(1, 200),
)
def test_rows_are_cut_into_parts(shapes: list[tuple[int, int]], limit: int) -> None:
    rows = SparseRows(tuple(Run([i], *shape) for i, shape in enumerate(shapes)))
    parts = rows.parts(limit)
    owners = [(run.block_ids, length) for run in rows.runs
              for length in range(run.first, run.first + run.count)]  # fmt: skip
    found = []
    for (at, part), following in zip(parts, [*parts[1:], None], strict=True):
        lengths = part.lengths
        assert at == slice(len(found), len(found) + len(lengths))
        assert len(lengths) <= 1 or len(lengths) * max(lengths) <= limit
        if following:  # one more row would have been too many
            longest = max(*lengths, following[1].lengths[0])
            assert (len(lengths) + 1) * longest > limit
        found += [(run.block_ids, length) for run in part.runs
                  for length in range(run.first, run.first + run.count)]  # fmt: skip
    assert found == owners


# -- selection -------------------------------------------------------------------------


@every("topk")
@pytest.mark.parametrize("topk", [1, TOPK, 60, 97, 200])
def test_selection_is_exact(module: str, topk: int) -> None:
    op = runnable("topk", module)
    scores, lengths = hard_scores()
    wanted = top_reference.run(scores, lengths, topk)
    wide = torch.full((len(scores), 120), torch.inf)
    wide[:, 10:107] = scores
    for given_scores in (scores, wide[:, 10:107], scores.T.contiguous().T):
        before = given_scores.clone()
        assert torch.equal(op.run(given_scores, lengths, topk), wanted)
        assert torch.equal(given_scores.nan_to_num(), before.nan_to_num())


@every("topk")
@given(
    values=st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 1.5, float("nan"), float("inf"),
                                     float("-inf"), 1e-40, -1e-40, 3e38]), max_size=40),
    topk=st.integers(1, 20),
)  # fmt: skip
def test_selection_of_anything(module: str, values: list[float], topk: int) -> None:
    op = runnable("topk", module)
    scores, lengths = torch.tensor([values]).view(1, -1), torch.tensor([len(values)])
    ours = op.run(scores, lengths, topk)
    assert torch.equal(ours, top_reference.run(scores, lengths, topk))


@every("topk")
def test_the_tie_rule(module: str) -> None:
    op = runnable("topk", module)
    scores = torch.tensor([[1.0, 0, 2, 0, 0, 2, 0, 1], [0.0, 0, 0, 0, 0, 0, 0, 0]])
    lengths = torch.tensor([8, 5])
    assert op.run(scores, lengths, 5).tolist() == [[0, 1, 2, 5, 7], [0, 1, 2, 3, 4]]
    assert op.run(scores, lengths, 3).tolist() == [[0, 2, 5], [0, 1, 2]]
    assert op.run(scores, lengths, 7).tolist() == [[0, 1, 2, 3, 4, 5, 7], [0, 1, 2, 3, 4, -1, -1]]


@every("topk")
def test_fill_is_never_stale(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory held before."""
    op = runnable("topk", module)
    real = torch.empty

    def garbage(*shape: Any, **options: Any) -> Tensor:
        return real(*shape, **options).fill_(7)

    monkeypatch.setattr(torch, "empty", garbage)
    short = op.run(torch.full((3, 4), torch.nan), torch.tensor([0, 2, 4]), 6)
    assert short.tolist() == [[-1] * 6, [0, 1, -1, -1, -1, -1], [0, 1, 2, 3, -1, -1]]
    no_scores = torch.empty(3, 0)  # none were made: nothing to look at
    assert torch.equal(op.run(no_scores, torch.tensor([0, 2, 4]), 6), short)


# -- attention over the selection ------------------------------------------------------


@every("sparse_mla")
@pytest.mark.parametrize(
    ("tiling", "block_size", "heads"), diagonal(TILINGS, [1, 3, 64], [1, H, 8, 19])
)
def test_sparse_mla(module: str, tiling: Any, block_size: int, heads: int) -> None:
    op = runnable("sparse_mla", module)
    step = mixed_step(replace(PLAIN, block_size=block_size))
    n = len(step.rows.lengths)
    q = randn(heads, n, L + R + 2, seed=9).transpose(0, 1)[..., 1:-1]  # strided
    positions = selections(step)["some"].T.contiguous().T
    before = [q.clone(), positions.clone()]
    exact = attended.listed(q, step.latent, step.rows, positions, 0.21)
    prepared = op.prepare(step.rows, step.latent, tiling)
    out, lse = op.run(q, step.latent, prepared, positions, softmax_scale=0.21)
    none = torch.tensor(step.rows.lengths) == 0
    assert none.any()
    same_attention("sparse_mla, strided", (out, lse), exact, torch.float32)
    assert torch.equal(q, before[0])
    assert torch.equal(positions, before[1])


@every("sparse_mla")
def test_nothing_else_is_read(module: str) -> None:
    """NaN at every position that was not chosen, and anything after the -1."""
    op = runnable("sparse_mla", module)
    step = mixed_step(PLAIN)
    q, positions = randn(len(step.rows.lengths), H, L + R, seed=9), selections(step)["some"]
    prepared = op.prepare(step.rows, step.latent, FULL)
    wanted = op.run(q, step.latent, prepared, positions, softmax_scale=0.21)
    row = 2  # a decode row of many positions
    others = torch.ones(step.rows.lengths[row], dtype=torch.bool)
    others[positions[row]] = False
    step.latent.rows[step.cells(row)[others]] = torch.nan
    ended = torch.cat((positions, torch.full((len(q), 1), -1), torch.zeros(len(q), 70).long()), 1)
    lengths = torch.tensor(step.rows.lengths)
    ended[lengths == 0, TOPK + 1 :] = -1
    for listed in (positions, ended):
        got = op.run(q, step.latent, prepared, listed, softmax_scale=0.21)
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


@every("sparse_mla")
def test_attention_bits_depend_on_the_row_alone(module: str) -> None:
    op = runnable("sparse_mla", module)
    step = mixed_step(replace(PLAIN, block_size=2))
    for positions in selections(step).values():
        n = len(step.rows.lengths)
        q = randn(n, H, L + R, seed=9)
        prepared = op.prepare(step.rows, step.latent, FULL)
        whole = op.run(q, step.latent, prepared, positions, softmax_scale=0.2)
        owners = [run.block_ids for run in step.rows.runs for _ in range(run.count)]
        for some in ([2], [0, 5], [40, 41, 2], list(range(n))[::-1]):
            rows = SparseRows(tuple(Run(owners[i], step.rows.lengths[i]) for i in some))
            part = op.prepare(rows, step.latent, FULL)
            ours = op.run(q[some], step.latent, part, positions[some], softmax_scale=0.2)
            assert torch.equal(ours[0], whole[0][some])
            assert torch.equal(ours[1], whole[1][some])


@every("sparse_mla")
def test_all_positions_give_the_bits_of_dense_decode(module: str) -> None:
    op, dense = runnable("sparse_mla", module), runnable("mla_decode", module)
    step = mixed_step(PLAIN)
    runs = [run for run in step.rows.runs if run.count == 1]
    n = len(runs)
    q, positions = randn(n, H, L + R, seed=3), selections(step)["all"][:n]
    rows = DecodeRows([run.first for run in runs], [run.block_ids for run in runs])
    given = dense.prepare(rows, step.latent, FULL, H)
    wanted = dense.run(q, step.latent, given, softmax_scale=0.2)
    prepared = op.prepare(SparseRows(tuple(runs)), step.latent, FULL)
    ours = op.run(q, step.latent, prepared, positions, softmax_scale=0.2)
    assert torch.equal(ours[0], wanted[0])
    assert torch.equal(ours[1], wanted[1])


@every("sparse_mla")
@pytest.mark.parametrize("position", [5, 6, BIG])
def test_a_position_that_a_row_does_not_see_is_an_error(module: str, position: int) -> None:
    op = runnable("sparse_mla", module)
    view = LatentStore(LatentLayout(L, R, 4), 1, 9, torch.float32).views[0]
    prepared = op.prepare(SparseRows((Run([1, 2], 5),)), view, FULL)
    with pytest.raises(ValueError, match="does not see"):
        op.run(randn(1, H, L + R), view, prepared, torch.tensor([[0, position]]), softmax_scale=0.2)


def test_rows_and_runs_are_counted_apart() -> None:
    rows = SparseRows((Run([4], 3), Run([5, 6], 2, 3), Run([], 0), Run([7], 1)))
    assert rows.lengths == [3, 2, 3, 4, 0, 1]
    table = Table.of(rows)
    assert table.run.tolist() == [0, 1, 1, 1, 2, 3]
    positions = torch.tensor(
        [[1, 2, -1], [0, 1, -1], [0, 2, -1], [1, 3, -1], [-1, 0, 0], [0, -1, 9]]
    )
    positions[4:, 1:] = -1
    cells, counts = table.cells(positions, LatentLayout(L, R, 3))
    assert counts.tolist() == [2, 2, 2, 2, 0, 1]
    assert [row[:n] for row, n in zip(cells.tolist(), counts.tolist(), strict=True)] == [
        [13, 14], [15, 16], [15, 17], [16, 18], [], [21]]  # fmt: skip


# -- the three together ----------------------------------------------------------------


def test_the_whole_chain_is_masked_attention() -> None:
    """Scores, selection and attention against one formula over plain tensors."""
    step = mixed_step(replace(PLAIN, block_size=2))
    q_index, weights = queries(step)
    n = len(step.rows.lengths)
    q = randn(n, H, L + R, seed=9)
    lengths = torch.tensor(step.rows.lengths)
    op, top, attend = (implementation(name, fast(name)[0]) for name in
                       ("index_scores", "topk", "sparse_mla"))  # fmt: skip
    prepared = op.prepare(step.rows, step.index, FULL, topk=TOPK)
    chosen = top.run(op.run(q_index, weights, step.index, prepared), lengths, TOPK)
    out, _ = attend.run(
        q, step.latent, attend.prepare(step.rows, step.latent, FULL), chosen, softmax_scale=0.2
    )
    row = 0
    for i, run in enumerate(step.rows.runs):
        for length in range(run.first, run.first + run.count):
            if length:
                keys = step.keys[i][:length].double()
                dots = torch.einsum("hd,sd->hs", q_index[row].double(), keys).relu()
                scores = weights[row].double() @ dots
                keep = torch.zeros(length, dtype=torch.bool)
                keep[scores.topk(min(TOPK, length)).indices] = True
                rows = step.latent.rows[step.cells(i)[:length]][keep].double()
                logits = 0.2 * q[row].double() @ rows.T
                off = 0.2 * gemm(q[row], rows, torch.float32)
                accepted, _ = softmax(logits, off, rows[:, :L])
                wanted = logits.softmax(-1) @ rows[:, :L]
                within("sparse_mla, the whole chain", out[row], wanted, accepted[:, None])
            row += 1


def test_ops_that_a_model_does_not_use_are_not_planned(tiny: Any) -> None:
    spec = read_model(tiny("deepseek_v3"))
    made = make_plan(spec, EngineConfig(num_gpu_blocks_override=4), find_device("cpu"))
    others = {*IndexKeys.ops, *LightningState.ops, *Window.ops, *TailsAll.ops, "hyper_connections"}
    assert made.selections.keys() == OPS.keys() - others
    assert others < OPS.keys()


def test_an_op_asked_for_that_cannot_run_is_refused_at_load(tiny: Any) -> None:
    spec = read_model(tiny("deepseek_v3"))
    config = EngineConfig(ops={"sparse_mla": "native"})
    with pytest.raises(UsageError, match="sparse_mla=native was asked for and refuses: float32"):
        choose_op("sparse_mla", config, Context(dtype=torch.bfloat16))
    make_plan(spec, config, find_device("cpu"))  # nothing wrong where the op is not used


@pytest.mark.parametrize("topk", [0, 3, 20])
@pytest.mark.parametrize("name", ["cpu", "native", "triton"])
def test_scores_of_entries(name: str, topk: int) -> None:
    """A key for every `ratio` positions: each residue of a row's length, runs across thresholds."""
    layout = IndexLayout(16, 16, "float32", "rows")
    store = IndexStore(layout, 1, 9)
    store.poison(range(9))
    view = store.views[0]
    blocks, ratio = [[3, 7], [5, 1, 8], [2]], 3
    for i, (ids, count) in enumerate(zip(blocks, (21, 40, 2), strict=True)):
        cells = torch.tensor(cells_of(16, ids, 0, count))
        view.write(cells, randn(count, 16, seed=i))
    rows = SparseRows((Run(blocks[0], 50, 15, ratio), Run(blocks[1], 122, 1, ratio),
                       Run(blocks[2], 1, 8, ratio), Run(blocks[1], 118, 1, ratio)))  # fmt: skip
    n = len(rows.lengths)
    assert rows.lengths[:15] == [p // 3 for p in range(50, 65)]
    q, weights = randn(n, 3, 16, seed=5), randn(n, 3, seed=6)
    exact, ours = (
        each.run(q, weights, view, each.prepare(rows, view, FULL, topk=topk))
        for each in (implementation("index_scores", other) for other in ("reference", name))
    )
    seen = exact != -torch.inf
    assert ours.shape == exact.shape
    assert seen.sum(1).tolist() == [length if length > topk else 0 for length in rows.lengths]
    torch.testing.assert_close(ours[seen].double(), exact[seen], rtol=1e-5, atol=1e-4)
    for limit in (1, 50, 1000):
        parts = rows.parts(limit)
        assert [length for _, part in parts for length in part.lengths] == rows.lengths
