"""Triton's kernels at the edges of their tiles: starts and lengths at residues 0, 1 and 2 on either
side of every tile, chunk, workspace and block, in a few launches of small dims. What an edge misses
or counts twice is whole terms; the gates are far above what float32 loses over so few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton_selection import check_scores, sequences
from torch import Tensor

from trueline.cache.kinds.latent import PrefillSlice
from trueline.cache.layout import LatentLayout
from trueline.cache.state import StateView
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.capabilities import HeadDims
from trueline.ops.experts import reference as experts_reference
from trueline.ops.experts import triton as experts
from trueline.ops.experts.triton import ExpertsLaunch, GemmTiles
from trueline.ops.index_scores import triton as index_scores
from trueline.ops.lightning import StateRow
from trueline.ops.lightning import triton as lightning
from trueline.ops.lightning.triton import PrefillLaunch
from trueline.ops.linear import triton as linear
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.mla_decode import triton as decode
from trueline.ops.mla_decode.launch_plan import launch as decode_launch
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.ops.route import reference as route_reference
from trueline.ops.route import triton as route
from trueline.ops.sparse_mla import triton as sparse
from trueline.ops.sparse_rows import Run, SparseRows
from trueline.verify.ops import randn
from trueline.verify.ops.basic import ROUTERS
from trueline.verify.ops.data import close, shuffled

GATE = 1e-4
TILE = 16
SCALE = 0.1
DIMS = (16, 8)
NOPE, VALUE = 8, 8
BLOCKS = (1, 3, 15, 16, 17, 24, 32, 48)
"""Divisors of a tile, multiples, larger ones that are neither, and what no power of two divides."""


def around(*multiples: int, least: int = 0) -> list[int]:
    """Residues 0, 1 and 2 on either side of multiples of a tile."""
    places = {multiple * TILE + off for multiple in multiples for off in (-2, -1, 0, 1, 2)}
    return sorted(place for place in places if place >= least)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def pages(lengths: list[int], block_size: int) -> tuple[LatentView, list[list[int]]]:
    """Rows of ordinary size in shuffled blocks; NaN where nobody is."""
    counts = [-(-length // block_size) for length in lengths]
    ids = shuffled(sum(counts) + 2, 1)
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    store = LatentStore(LatentLayout(*DIMS, block_size), 1, sum(counts) + 3, torch.float32)
    store.poison(range(sum(counts) + 3))
    view = store.views[0]
    for row, length in enumerate(lengths):
        cells = torch.tensor(view.layout.cells(blocks[row], 0, length), dtype=torch.long)
        view.rows[cells] = randn(length, sum(DIMS), seed=row)
    return view, blocks


def softmax_rows(scores: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """[q, keys] and [keys, v]; zeros where nothing is seen."""
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return shares @ values


# -- latent attention ------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "needle"), [(1, False), (7, False), (7, True)])
@pytest.mark.parametrize("block_size", BLOCKS)
def test_decode(
    monkeypatch: pytest.MonkeyPatch, block_size: int, groups: int, needle: bool
) -> None:
    """Whole rows, and rows in parts that are merged: parts of much the same weight, and parts whose
    largest scores are e^100 apart and more."""
    lengths = [0, 1, 2, *around(1, 2, 3)] if groups == 1 else [83]
    view, blocks = pages(lengths, block_size)
    monkeypatch.setattr(
        decode, "launch", lambda *given: replace(decode_launch(*given), groups=groups, tile=TILE)
    )
    q = randn(len(lengths), 1, sum(DIMS), seed=9)
    if needle:
        view.rows[view.layout.cells(blocks[0], 40, 41)] = 80 * q[0]
    prepared = decode.prepare(DecodeRows(lengths, blocks), view, prefill.TILING, 1)
    ours, _ = decode.run(q, view, prepared, softmax_scale=SCALE)
    for row, length in enumerate(lengths):
        cells = torch.tensor(view.layout.cells(blocks[row], 0, length), dtype=torch.long)
        keys = view.rows[cells].double()
        seen = torch.ones(1, length, dtype=torch.bool)
        exact = softmax_rows(SCALE * q[row].double() @ keys.T, seen, keys[:, : DIMS[0]])
        close(f"{length} positions, blocks of {block_size}", ours[row], exact, GATE)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_lists(block_size: int) -> None:
    """The first and last positions of blocks, in lists that end at edges of tiles."""
    lengths = [50, 50, 50]
    view, blocks = pages(lengths, block_size)
    runs = SparseRows(tuple(Run(ids, 50) for ids in blocks))
    positions = torch.full((3, 33), -1)
    for row, count in enumerate((TILE - 1, TILE + 1, 33)):
        positions[row, :count] = randn(50, seed=row).argsort()[:count]
    q = randn(3, 1, sum(DIMS), seed=9)
    prepared = sparse.prepare(runs, view, prefill.TILING)
    ours, _ = sparse.run(q, view, prepared, positions, softmax_scale=SCALE)
    for row, ids in enumerate(blocks):
        cells = torch.tensor(view.layout.cells(ids, 0, 50))
        keys = view.rows[cells].double()
        seen = torch.zeros(1, 50, dtype=torch.bool)
        seen[0, positions[row][positions[row] >= 0]] = True
        exact = softmax_rows(SCALE * q[row].double() @ keys.T, seen, keys[:, : DIMS[0]])
        close(f"list {row}, blocks of {block_size}", ours[row], exact, GATE)


WORKSPACE = 64
SHAPES = [(start, count) for start in around(1) for count in around(1)]
SHAPES += [(0, 1), (1, 17), (2, 33), (0, 16), (1, 1), (31, 2), (30, 1)]
# rows that end where the workspace is full, or just not
SHAPES += [(63, 1), (64, 1), (47, 16), (47, 17), (47, 18), (110, 18), (111, 18)]


def prefill_parts(shapes: list[tuple[int, int]], block_size: int) -> tuple[LatentView, list[Any]]:
    view, blocks = pages([sum(shape) for shape in shapes], block_size)
    parts, token, chosen = [], 0, 0
    for (start, count), ids in zip(shapes, blocks, strict=True):
        row = PrefillRow(start, count, ids)
        parts.append(PrefillSlice(slice(token, token + count), row, chosen))
        token, chosen = token + count + 1, chosen + count
    return view, parts


@pytest.mark.parametrize(
    ("keys", "block_size", "chooses"), [(16, 3, False), (16, 24, True), (64, 16, True)]
)
def test_prefill(
    monkeypatch: pytest.MonkeyPatch, keys: int, block_size: int, chooses: bool
) -> None:
    def plan(*given: Any) -> prefill_cut.PrefillLaunchPlan:
        cut = {"queries": TILE, "keys": keys, "workspace": WORKSPACE}
        return replace(prefill_cut.launch(*given), **cut)

    monkeypatch.setattr(prefill, "launch", plan)
    monkeypatch.setattr(prefill, "FEW", 0)
    view, parts = prefill_parts(SHAPES[:: 2 if chooses else 1], block_size)
    tokens = parts[-1].tokens.stop + 1
    heads = HeadWeights(randn(1, DIMS[0], NOPE, seed=5) / 4, randn(1, VALUE, DIMS[0], seed=6) / 4)
    q = randn(tokens, 1, NOPE + DIMS[1], seed=7)
    given, dims = (q[..., :NOPE], q[..., NOPE:]), HeadDims(1, NOPE, VALUE)
    out = torch.full((tokens, 1, VALUE), torch.nan)
    picked = randn(tokens, 140, seed=8) > -1.0  # of all positions: most of them
    if chooses:
        rows = [
            (picked[t, : part.row.start + 1 + i]).nonzero()[:, 0].tolist()
            for part in parts
            for i, t in enumerate(range(part.tokens.start, part.tokens.stop))
        ]
        lists = torch.full((len(rows), 141), -1)
        for i, each in enumerate(rows):
            lists[i, : len(each)] = torch.tensor(each, dtype=torch.long)
        prepared = prefill.prepare_chosen(parts, view, dims)
        prefill.run_chosen(*given, view, prepared, heads, out, lists, softmax_scale=SCALE)
    else:
        prepared = prefill.prepare(parts, view, dims, decode)
        prefill.run(*given, view, prepared, heads, out, softmax_scale=SCALE)
    between = torch.ones(tokens, dtype=torch.bool)
    for part in parts:
        row, end = part.row, part.row.start + part.row.count
        cached = view.rows[torch.tensor(view.layout.cells(row.block_ids, 0, end))].double()
        latent, rope = cached[:, : DIMS[0]], cached[:, DIMS[0] :]
        made = q[part.tokens, 0].double()
        scores = made[:, :NOPE] @ (latent @ heads.key[0].double()).T + made[:, NOPE:] @ rope.T
        seen = torch.arange(end) <= torch.arange(row.start, end)[:, None]
        seen = seen & picked[part.tokens, :end] if chooses else seen
        exact = softmax_rows(SCALE * scores, seen, latent @ heads.value[0].double().T)
        close(f"{row.start} + {row.count}, tiles of {keys}", out[part.tokens, 0], exact, GATE)
        between[part.tokens] = False
    assert out[between].isnan().all()


# -- index scores ----------------------------------------------------------------------


@pytest.mark.parametrize("size", BLOCKS)
def test_index_scores(size: int) -> None:
    lengths = [1, *around(1, 2)]
    view, blocks = sequences([*lengths, 50], 16, "float32", size=size)
    singles = tuple(Run(ids, n) for ids, n in zip(blocks, lengths, strict=False))
    how = index_scores.ScoresLaunch(TILE, 2, 4, 1)
    for rows in (SparseRows(singles), SparseRows((Run(blocks[-1], 29, 21),))):
        n = len(rows.lengths)
        q, weights = randn(n, 2, 16, seed=2), randn(n, 2, seed=3)
        prepared = index_scores.prepare(rows, view, prefill.TILING, topk=0)
        check_scores(index_scores.run(q, weights, view, prepared, how), q, weights, view, rows)


# -- linear attention ------------------------------------------------------------------


@pytest.mark.parametrize("programs", [1, 1000])
def test_linear_attention(programs: int) -> None:
    """Rows of every length around one, two and five chunks, a snapshot at every edge inside; in
    one walk, and in walks of a chunk each."""
    counts = [1, 2, *around(1, 2, 5)]
    view_of = [(5, count, place) for count in counts for place in {max(count - 1, 1), TILE}]
    rows = [each for each in view_of if each[2] <= each[1]]
    state = randn(3 * len(rows) + 1, 1, 16, 16)
    none = torch.empty(len(state), 1, 0, 16)
    view, before = StateView(state, none, none), state.clone()
    parts, token = [], 1
    for i, (start, count, place) in enumerate(rows):
        row = StateRow(start, 3 * i + 1, 3 * i + 2, ((start + place, 3 * i + 3),))
        parts.append((slice(token, token + count), row))
        token += count + 1
    q, k, v = (randn(token, 1, 16, seed=i) for i in range(3))
    launch = PrefillLaunch(TILE, 16, 4, 1, programs)
    slope = 0.05
    prepared = lightning.prepare_prefill(parts)
    out = lightning.prefill(
        q, k, v, view, prepared, slopes=torch.tensor([slope]), scale=SCALE, launch=launch
    )
    fade = torch.tensor(-slope, dtype=torch.float64).exp()
    for (at, row), (_, count, place) in zip(parts, rows, strict=True):
        carried = before[row.source, 0].double()
        exact = []
        for i, t in enumerate(range(at.start, at.stop), 1):
            carried = fade * carried + k[t, 0].double()[:, None] * v[t, 0].double()
            exact.append(SCALE * q[t, 0].double() @ carried)
            for reached, slot in ((place, row.slot + 1), (count, row.slot)):
                if i == reached:
                    close(f"{count} tokens, state after {reached}", state[slot, 0], carried, GATE)
        close(f"{count} tokens", out[at, 0], torch.stack(exact), GATE)


# -- experts ---------------------------------------------------------------------------


def all_experts(x: Tensor, ids: Tensor, weights: Tensor, packed: Any) -> Tensor:
    """With the shared experts as every token's, of weight 1."""
    count, shared = len(packed.down), packed.shared
    mine = torch.arange(count - shared, count).expand(len(x), shared)
    given = experts_reference.pack(packed.gate_up, packed.down, None)
    every = torch.cat((weights.double(), torch.ones(len(x), shared)), 1)
    return experts_reference.run(x.double(), torch.cat((ids, mine), 1), every, given, None)


SMALL = ExpertsLaunch("sorted", GemmTiles(32, 16, swap=False), GemmTiles(16, 16))
HALVED = ExpertsLaunch(
    "sorted",
    GemmTiles(32, 16, rows=32, swap=False, halve=True, group=2),
    GemmTiles(16, 16, rows=32),
)


@pytest.mark.parametrize("how", [SMALL, HALVED], ids=["plain", "halved"])
def test_experts_sorted(how: ExpertsLaunch) -> None:
    """As many pairs of an expert as fill its tiles, or almost, or a few more; none at all."""
    for hidden, width in ((15, 17), (33, 16)):
        loads = [0, 1, 15, 16, 17, 0, 33]
        ids = torch.cat([torch.full((load,), e) for e, load in enumerate(loads)])
        n = len(ids)
        ids = torch.stack((ids[randn(n).argsort()], torch.full((n,), len(loads))), 1)
        count = len(loads) + 1
        packed = experts.pack_with_shared(
            randn(count, 2 * width, hidden) / 4, randn(count, hidden, width, seed=1) / 4,
            randn(2 * width, hidden, seed=2) / 4, randn(hidden, width, seed=3) / 4, None,
        )  # fmt: skip
        x, weights = randn(n, hidden, seed=4), randn(n, 2, seed=5)
        ours = experts.run_with(how, x, ids, weights, packed)
        close(f"{hidden} × {width}", ours, all_experts(x, ids, weights, packed), GATE)


def test_experts_streamed() -> None:
    for hidden, width, columns in ((15, 17, 4), (16, 16, 8), (17, 15, 4), (9, 33, 2)):
        packed = experts.pack(
            randn(4, 2 * width, hidden) / 4, randn(4, hidden, width, seed=1) / 4, None
        )
        x, weights, ids = (
            randn(2, hidden, seed=4),
            randn(2, 2, seed=5),
            torch.tensor([[3, 0], [1, 3]]),
        )
        exact = all_experts(x, ids, weights, packed)
        for second in (GemmTiles(columns, 16), GemmTiles(columns, 0)):
            how = ExpertsLaunch("few", GemmTiles(columns, 0), second)
            close(
                f"{hidden} × {width}", experts.run_with(how, x, ids, weights, packed), exact, GATE
            )


def test_streamed_products() -> None:
    for rows in (1, 2, 3, 4):
        for width, depth in ((1, 15), (7, 16), (8, 17), (9, 1), (15, 31), (17, 33)):
            x, weight = randn(rows, 2, depth), randn(2, width, depth, seed=1)
            out = torch.full((rows, 2, width + 1), torch.nan)
            how = linear.LinearLaunch(8, 1 << (depth - 1).bit_length())
            linear.streamed(x, weight, out[..., :-1], how)
            exact = torch.einsum("nhi,hoi->nho", x.double(), weight.double())
            close(f"{rows} × {width} × {depth}", out[..., :-1], exact, GATE)
            assert out[..., -1].isnan().all()


def test_router_products() -> None:
    """Tokens, experts and channels at the edges of tiles; split-K or not."""
    router = replace(ROUTERS["v2 greedy"], top_k=1)
    for tokens, count, hidden, depth in ((1, 15, 16, 16), (15, 17, 17, 32), (16, 16, 31, 16),
                                         (17, 33, 33, 16), (3, 2, 47, 32)):  # fmt: skip
        weight, x = randn(count, hidden), randn(tokens, hidden, seed=1)
        how = route.RouteLaunch(TILE, TILE, TILE, depth)
        packed = route.pack(weight, torch.float32, linear)
        ids, weights = route.choose_with(how, x, packed, None, router)
        logits = x.double() @ weight.double().T
        exact_ids, exact = route_reference.run(logits, None, router)
        assert torch.equal(ids, exact_ids)
        assert torch.allclose(weights.double(), exact.double(), rtol=GATE, atol=0)
