"""Latent attention in Triton: the checks of verify/ops through the interpreter (or on the GPU where
there is one), every way to cut the work, and the sizes that follow from the launch plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.cache.kinds.latent import PrefillSlice
from trueline.cache.layout import LatentLayout
from trueline.ops.capabilities import Context, HeadDims
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.mla_decode import triton as decode
from trueline.ops.mla_decode.launch_plan import LaunchPlan, launch
from trueline.ops.mla_decode.split_schedule import LONGER, split_schedule
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.ops.registry import implementation
from trueline.ops.sparse_mla import triton as sparse
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.verify.failed import CheckFailed
from trueline.verify.ops import OP_CHECKS, attended, attention, latent_fp8
from trueline.verify.ops import sparse as sparse_checks
from trueline.verify.ops.data import L, P, R, V, paged, randn, within

FLOATS = (torch.float32, torch.float16)
ONE_OF_FLOATS = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16]
WAYS = {
    "plain": {"tile": 64},
    "wide": {"tile": 64, "overhead": 0, "least": 1},
}
LAYOUT = LatentLayout(512, 64, 64)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small machine, so that rows are cut and scheduled all the same; one tiling, as all are
    alike here."""
    for module in (decode, sparse):
        monkeypatch.setattr(module, "num_sms", lambda device: 3)
    for checks in (attention, sparse_checks):
        monkeypatch.setattr(checks, "TILINGS", checks.TILINGS[:1])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def cut(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(decode, "launch", lambda *given: replace(launch(*given), **changes))


# -- mla_decode ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "wide"])
def test_decode(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    cut(monkeypatch, **WAYS[way])
    dtype = torch.float32 if way == "plain" else torch.float16
    monkeypatch.setattr(attention, "SHAPES", ((3, 19), (64, 5)))
    attention.mla_decode(decode, dtype)
    attention.natural_lse(decode, dtype)


@pytest.mark.parametrize("dtype", ONE_OF_FLOATS)
def test_decode_of_real_dims(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(attention, "WIDE_SHAPES", ((16, 40, 5),))
    attention.mla_decode_wide(decode, dtype)


@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill", "sparse_mla"])
@pytest.mark.parametrize("dtype", ONE_OF_FLOATS)
def test_latents_in_fp8(monkeypatch: pytest.MonkeyPatch, op: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(latent_fp8, "BLOCK_SIZES", (3, 64))
    monkeypatch.setattr(sparse_checks, "DECODE", (25, 0, 70))
    check = next(check for check in OP_CHECKS[op] if check.what == "fp8")
    check.run(implementation(op, "triton"), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("way", WAYS)
def test_decode_fully(monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype) -> None:
    cut(monkeypatch, **WAYS[way])
    attention.mla_decode(decode, dtype)


def test_buffers_that_other_contexts_fill_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, tile=128)
    attention.decode_table(decode)


@pytest.mark.parametrize("heads", [1, 4, 8, 15, 16, 17])
def test_any_number_of_heads(heads: int) -> None:
    """Story 5: sizes come from the padded count. The queries lie apart in memory."""
    view, rows = paged([70, 0, 33], 16)
    q = randn(3, heads + 2, L + R + 3, seed=1)[:, 1:-1, 2:-1]
    exact = attended.decode(q, view, rows, 0.3)
    prepared = decode.prepare(rows, view, attention.FIXED, heads)
    ours = decode.run(q, view, prepared, softmax_scale=0.3)
    attention.same_attention(f"mla_decode, {heads} heads", ours, exact, torch.float32)


def test_no_rows() -> None:
    view, _ = paged([5], 4)
    prepared = decode.prepare(DecodeRows([], []), view, attention.FIXED, 3)
    out, lse = decode.run(randn(0, 3, L + R), view, prepared, softmax_scale=1.0)
    assert out.shape == (0, 3, L)
    assert lse.shape == (0, 3)


@pytest.mark.parametrize("fault", ["unpadded heads", "a short list", "few partials"])
def test_what_no_size_has_room_for_is_nan(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """One long row uses up all entries and all partials."""
    if fault == "unpadded heads":
        made = property(lambda plan: plan.heads // plan.head_tile)
        monkeypatch.setattr(LaunchPlan, "head_tiles", made)
    else:
        name = "entries" if fault == "a short list" else "partials"
        real = getattr(LaunchPlan, name)
        monkeypatch.setattr(LaunchPlan, name, lambda plan, rows: real(plan, rows) - 1)
    view, rows = paged([200], 16)
    for heads in (1, 15):
        prepared = decode.prepare(rows, view, attention.FIXED, heads)
        out, lse = decode.run(randn(1, heads, L + R), view, prepared, softmax_scale=0.3)
        assert out.isnan().all()
        assert lse.isnan().all()


def test_a_whole_row_without_room_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, groups=1)
    monkeypatch.setattr(LaunchPlan, "entries", lambda plan, rows: rows - 1)
    view, rows = paged([20, 9], 16)
    prepared = decode.prepare(rows, view, attention.FIXED, 2)
    out, lse = decode.run(randn(2, 2, L + R), view, prepared, softmax_scale=0.3)
    assert out.isfinite().all(-1).all(-1).tolist() == [True, False]
    assert lse[1].isnan().all()


def test_more_parts_than_are_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "AT_ONCE", 128)  # two, of the 64 columns here
    cut(monkeypatch, groups=7, least=1)
    view, rows = paged([16 * 9], 16)
    q = randn(1, 2, L + R)
    exact = attended.decode(q, view, rows, 0.03)
    prepared = decode.prepare(rows, view, attention.FIXED, 2)
    ours = decode.run(q, view, prepared, softmax_scale=0.03)
    attention.same_attention("mla_decode, 7 parts", ours, exact, torch.float32)


def test_the_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    made = property(lambda plan: plan.heads // plan.head_tile)
    monkeypatch.setattr(LaunchPlan, "head_tiles", made)
    with pytest.raises(CheckFailed, match="1 heads"):
        attention.mla_decode(decode)


# -- sparse_mla ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ONE_OF_FLOATS)
def test_sparse(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(sparse, "launch", coarse)
    sparse_checks.sparse_mla(sparse, dtype)


def coarse(*given: Any) -> LaunchPlan:
    return replace(launch(*given), tile=64)


def test_nothing_but_the_list_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN at every position that is not listed; whatever follows the -1; lists cut in chunks that
    end before, at and after it; a table on the device; layers of one step share their work."""
    monkeypatch.setattr(sparse, "CHUNK", 16)
    view, held = paged([100, 40, 0], 4)
    lists = [[99, 3, *range(50, 80), 1], [*range(16), -1, 0], [-1, 0, 1]]
    positions = torch.tensor([[-1, *each, *[5] * (34 - len(each))] for each in lists])[:, 1:34]
    blocks = torch.zeros(3, 25, dtype=torch.long)
    for row, ids in enumerate(held.block_ids):
        blocks[row, : len(ids)] = torch.tensor(ids)
    cells = [torch.tensor(view.layout.cells(ids, 0, len(ids) * 4)) for ids in held.block_ids]
    for row, each in enumerate(lists[:2]):
        others = torch.ones(held.lengths[row], dtype=torch.bool)
        others[each[: each.index(-1)] if -1 in each else each] = False
        view.rows[cells[row][: held.lengths[row]][others]] = torch.nan
    table = Table(blocks, torch.arange(3), torch.tensor(held.lengths))
    prepared = sparse.prepare(table, view, attention.FIXED)
    rows = SparseRows(tuple(Run(*each) for each in zip(held.block_ids, held.lengths, strict=True)))
    for seed in (1, 2):
        q = randn(3, 2, L + R, seed=seed)
        exact = attended.listed(q, view, rows, positions, 0.2)
        ours = sparse.run(q, view, prepared, positions, softmax_scale=0.2)
        attention.same_attention("sparse_mla, listed", ours, exact, torch.float32)
    assert len(prepared.schedules) == 1


@pytest.mark.parametrize("position", [5, 6, 1 << 40])
def test_a_position_that_a_row_does_not_see_is_nan(position: int) -> None:
    view, held = paged([5, 5], 4)
    runs = tuple(Run(ids, 5) for ids in held.block_ids)
    prepared = sparse.prepare(SparseRows(runs), view, attention.FIXED)
    positions = torch.tensor([[0, position, 1], [0, -1, position]])
    out, lse = sparse.run(randn(2, 3, L + R), view, prepared, positions, softmax_scale=0.2)
    for each in (out.sum(-1), lse):
        assert each[0].isnan().all()
        assert each[1].isfinite().all()


def test_no_sparse_rows() -> None:
    view, _ = paged([5], 4)
    prepared = sparse.prepare(SparseRows(()), view, attention.FIXED)
    none = torch.zeros(0, 4, dtype=torch.long)
    out, _ = sparse.run(randn(0, 3, L + R), view, prepared, none, softmax_scale=1.0)
    assert out.shape == (0, 3, L)


# -- mla_prefill -----------------------------------------------------------------------


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little workspace that rows take several runs."""
    monkeypatch.setattr(prefill, "launch", small_plan)


def small_plan(*given: Any) -> prefill_cut.PrefillLaunchPlan:
    return replace(prefill_cut.launch(*given), queries=32, keys=128, workspace=192)


def large_plan(*given: Any) -> prefill_cut.PrefillLaunchPlan:
    return replace(prefill_cut.launch(*given), queries=128, keys=128)


@pytest.mark.parametrize("dtype", ONE_OF_FLOATS)
@pytest.mark.usefixtures("short_runs")
def test_prefill(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    cut(monkeypatch, tile=256)
    monkeypatch.setattr(attention, "PREFILL_BLOCKS", (5,))
    monkeypatch.setattr(attention, "PREFILLS", ((0, 1), (30, 45), (600, 3)))
    attention.mla_prefill(prefill, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_prefill_fully(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    cut(monkeypatch, tile=256)
    monkeypatch.setattr(attention, "PREFILL_BLOCKS", (5,))
    monkeypatch.setattr(prefill, "launch", large_plan)
    attention.mla_prefill(prefill, dtype)


@pytest.mark.usefixtures("short_runs")
def test_prefill_rows_together() -> None:
    """Short ones in the latent, long ones over several runs, others side by side in one; tokens
    between them, queries and weights are not theirs to touch."""
    heads = HeadWeights(randn(3, L, P, seed=5) / 6, randn(3, V, L, seed=6) / 6)
    shapes = [(0, 20), (300, 40), (7, 2), (0, 33), (100, 17), (290, 3)]
    view, held = paged([sum(shape) for shape in shapes], 4)
    parts, token = [], 2
    for (start, count), ids in zip(shapes, held.block_ids, strict=True):
        parts.append(PrefillSlice(slice(token, token + count), PrefillRow(start, count, ids)))
        token += count + 1
    q = randn(token, 3, P + R + 2, seed=7)[..., 1:-1]
    prepared = prefill.prepare(parts, view, HeadDims(3, P, V), decode)
    for _ in range(2):
        out = torch.full((token, 3, V), torch.nan)
        prefill.run(q[..., :P], q[..., P:], view, prepared, heads, out, softmax_scale=0.2)
        free = torch.ones(token, dtype=torch.bool)
        for part in parts:
            exact = attended.prefill(q[part.tokens], view, part.row, heads, 0.2)
            what = f"mla_prefill, {part.row.start} + {part.row.count}"
            within(what, out[part.tokens], exact.out, exact.out_bound[..., None])
            free[part.tokens] = False
        assert out[free].isnan().all()


@pytest.mark.parametrize("workspace", [64, 128, 1024])
def test_queries_see_every_key_once(workspace: int) -> None:
    plan = prefill_cut.PrefillLaunchPlan(
        queries=32, keys=16, warps=4, stages=3, heads=1, workspace=workspace
    )
    shapes = [(0, 1), (200, 40), (0, 100), (63, 1), (127, 2), (0, 64)]
    parts, token = [], 0
    for number, (start, count) in enumerate(shapes):
        ids = [number] * 10
        parts.append(PrefillSlice(slice(token, token + count), PrefillRow(start, count, ids)))
        token += count
    blocks, chunks, state = prefill_cut.cut(parts, plan)
    assert blocks == [number for number in range(len(shapes)) for _ in range(10)]
    seen: dict[int, list[int]] = {}
    finished: set[int] = set()
    for chunk in chunks:
        assert chunk.total <= workspace
        taken = sorted(to + i for _, _, n, to in quadruples(chunk.places) for i in range(n))
        assert taken == list(range(chunk.total))
        assert [tile.seen for tile in chunk.tiles] == sorted(t.seen for t in chunk.tiles)[::-1]
        for tile in chunk.tiles:
            for i in range(tile.queries):
                visible = min(tile.position + i + 1 - tile.first, tile.keys)
                mine = seen.setdefault(tile.token + i, [])
                assert bool(tile.resumes) == (tile.first > 0)
                assert not tile.resumes or tile.token in range(state.start, state.stop)
                mine += range(tile.first, tile.first + visible)
                assert tile.token + i not in finished
                finished |= {tile.token + i} if tile.finishes else set()
    positions = [start + i for start, count in shapes for i in range(count)]
    assert finished == set(range(token))
    assert [seen[t] for t in range(token)] == [list(range(p + 1)) for p in positions]


def quadruples(numbers: list[int]) -> list[list[int]]:
    return [numbers[i : i + 4] for i in range(0, len(numbers), 4)]


def test_prefill_plans() -> None:
    for heads, nope, value in ((16, 128, 128), (128, 128, 128), (64, 192, 256), (5, P, V)):
        for dtype in (*FLOATS, torch.bfloat16):
            plan = prefill_cut.launch(HeadDims(heads, nope, value), 64, dtype)
            assert heads % plan.heads == 0
            assert plan.workspace % 64 == 0
            size = plan.workspace * heads * (nope + value) * dtype.itemsize
            assert size <= prefill_cut.WORKSPACE_BYTES


# -- the list of work ------------------------------------------------------------------


def scheduled(lengths: list[int], plan: LaunchPlan) -> list[list[list[int]]]:
    """Entries of each group; the list as the device makes it."""
    work = split_schedule(torch.tensor(lengths, dtype=torch.int32), plan)
    assert len(work.entries) == plan.entries(len(lengths))
    bounds, entries = work.bounds.tolist(), work.entries.tolist()
    assert bounds == sorted(bounds)
    check_rows(work.rows, entries[: bounds[-1]], lengths)
    return [entries[a:b] for a, b in pairwise(bounds)]


def check_rows(rows: Tensor, entries: list[list[int]], lengths: list[int]) -> None:
    """What is said of rows is what is listed; partials are used one after the other."""
    ends, partials, counts = rows.tolist()
    used = 0
    for row in range(len(lengths)):
        mine = [entry for entry in entries if entry[0] == row]
        assert counts[row] == len(mine)
        assert mine == entries[ends[row] - len(mine) : ends[row]]
        if len(mine) > 1:
            assert partials[row] == used
            assert [entry[3] for entry in mine] == list(range(used, used + len(mine)))
            used += len(mine)
        else:
            assert all(entry[3] == -1 for entry in mine)


@pytest.mark.parametrize("seed", range(6))
def test_every_tile_is_scheduled_once_in_equal_shares(seed: int) -> None:
    draw = random.Random(seed)
    longest = draw.choice([1, 40, 700])
    lengths = [draw.randint(0, longest) for _ in range(draw.choice([1, 3, 20]))]
    overhead, least = draw.choice([(0, 1), (1, 2), (3, 4)])
    equal_shares(lengths, draw.choice([1, 2, 5, 9]), overhead, least)


def test_no_part_is_empty_where_beginning_costs_more_than_a_share() -> None:
    equal_shares([16, 0, 16, 1, 40], 9, 3, 1)


def equal_shares(lengths: list[int], groups: int, overhead: int, least: int) -> None:
    plan = LaunchPlan(heads=4, head_tile=16, tile=16, groups=groups, overhead=overhead, least=least)
    shares = scheduled(lengths, plan)
    assert len(shares) == groups
    tiles = [-(-length // 16) for length in lengths]
    walked: list[list[int]] = [[] for _ in lengths]
    for share in shares:
        for row, start, stop, _ in share:
            assert start < stop
            walked[row] += range(start, stop)
    assert walked == [list(range(count)) for count in tiles]
    work = sum(count + overhead for count in tiles if count)
    parties = min(max(work // least, 1), groups)
    most = -(-work // parties)
    if all(len(share) <= 1 for share in shares) and all(s == -1 for x in shares for *_, s in x):
        most = max(most, work * (LONGER + 1) // (parties * LONGER) - overhead)
    assert all(sum(stop - start for _, start, stop, _ in share) <= most for share in shares)


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ([16 * 20] * 8, True),
        ([16 * 20, 16 * 21, 0, 16 * 20, 0, 16 * 19, 16 * 20, 16 * 20, 16 * 20, 16 * 20], True),
        ([16 * 20] * 7 + [16 * 26], False),  # all the others would wait for it
        ([16 * 20] * 6, False),  # a quarter of the groups would have nothing to do
        ([16 * 20] * 9, False),  # one more than there are groups
        ([16 * 20] * 300, False),
    ],
)
def test_rows_of_like_length_stay_whole(lengths: list[int], whole: bool) -> None:
    shares = scheduled(
        lengths, LaunchPlan(heads=4, head_tile=16, tile=16, groups=8, overhead=1, least=2)
    )
    partials = [partial for share in shares for *_, partial in share]
    assert all(partial == -1 for partial in partials) == whole
    if whole:
        alive = [(row, -(-length // 16)) for row, length in enumerate(lengths) if length]
        assert [[(row, stop) for row, _, stop, _ in share] for share in shares] == [
            [each] for each in alive
        ]


def test_sizes_are_reached_but_never_exceeded() -> None:
    """Bounds of entries and partials, at their worst: every cut inside a row of its own, and all
    cuts inside one row."""
    groups = 5
    plan = LaunchPlan(heads=4, head_tile=16, tile=16, groups=groups, overhead=0, least=1)
    for lengths in ([16 * 50], [16 * 9] * 6, [16 * 5] * 5, [16] * 30, [0, 0], [3]):
        entries = [entry for share in scheduled(lengths, plan) for entry in share]
        partials = sum(entry[3] >= 0 for entry in entries)
        assert len(entries) <= plan.entries(len(lengths))
        assert partials <= plan.partials(len(lengths)) <= 2 * (groups - 1)
        if lengths == [16 * 50]:
            assert len(entries) == plan.entries(1) == partials == plan.partials(1) == groups
        if lengths == [16 * 9] * 6:
            assert len(entries) == plan.entries(6) == 6 + groups - 1
            assert partials == plan.partials(6) == 2 * (groups - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 15, 16, 17, 32, 64, 100, 128])
def test_launch_plans(dtype: torch.dtype, heads: int) -> None:
    plan = launch(heads, LAYOUT, dtype, 132, 256, 160_000)
    assert plan.padded_heads >= heads > plan.padded_heads - plan.head_tile
    assert plan.programs <= 2 * 132
    assert plan.groups > 264 // plan.head_tiles // 2 - 1
    partials = plan.partials(1 << 20)
    assert partials * plan.padded_heads * LAYOUT.latent * 4 <= 40 << 20  # bytes, whatever the batch
    assert launch(heads, LAYOUT, dtype, 132, 1, 20).groups <= 2
    if dtype.itemsize == 2:  # what was measured is what is taken: it fits
        assert plan.tile == 64 if heads > 32 else plan.tile == 32


def test_refusals() -> None:
    refusals = decode.capabilities.refusals
    assert not refusals(Context(dtype=torch.bfloat16))
    assert refusals(Context(dtype=torch.float64))
    assert refusals(Context(dtype=torch.bfloat16, batch_invariant=True))
