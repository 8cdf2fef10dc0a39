"""The last block and the last slot of a cache of more numbers than 32 bits can count, and rows that
lie as far apart: the bits of a small cache. Memory that nobody touches is not there."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.kinds.latent import PrefillSlice
from trueline.cache.layout import INDEX_LAYOUTS, IndexLayout, LatentFp8, LatentLayout
from trueline.cache.state import StateStore, StateView
from trueline.cache.store import LatentStore, LatentView
from trueline.device import interpreting
from trueline.ops.capabilities import Context, HeadDims
from trueline.ops.experts import triton as experts
from trueline.ops.gated_norm import triton as gated_norm
from trueline.ops.index_scores import triton as index_scores
from trueline.ops.index_write import triton as index_write
from trueline.ops.latent_write import triton as latent_write
from trueline.ops.lightning import StateRow
from trueline.ops.lightning import triton as lightning
from trueline.ops.lightning.triton import DecodeLaunch, PrefillLaunch
from trueline.ops.mla_decode import DecodeRows, Tiling
from trueline.ops.mla_decode import triton as mla_decode
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import triton as mla_prefill
from trueline.ops.qkv_prepare import triton as qkv_prepare
from trueline.ops.registry import implementation, refusals
from trueline.ops.rms_norm import triton as rms_norm
from trueline.ops.rope import triton as rope
from trueline.ops.route import triton as route
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.verify.ops import randn
from trueline.verify.ops.basic import ROUTERS
from trueline.verify.ops.linear_layer import PARTS

NUMBERS = (1 << 31) + (1 << 20)
"""Of float32, each with an offset; the last ones' do not fit 32 bits."""
FULL = Tiling(64, full=True)
KEPT = 8
"""Blocks or slots of the small cache, which are the last ones of the other."""

pytestmark = pytest.mark.skipif(not interpreting(), reason="addresses of the interpreter")


@pytest.fixture(scope="module")
def far() -> Tensor:
    reserved = getattr(mmap, "MAP_NORESERVE", 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserved
    return torch.frombuffer(mmap.mmap(-1, 4 * NUMBERS, flags=flags), dtype=torch.float32)


@pytest.fixture(autouse=True)
def overflow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of an access to wherever it leads."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))


def cpu_or_triton(op: str) -> list[Any]:
    """Every implementation but the reference that runs here, or is interpreted."""
    names = [
        name for name in ("native", "cpu") if not refusals(op, name, Context(dtype=torch.float32))
    ]
    return [implementation(op, name) for name in (*names, "triton")]


# -- blocks ----------------------------------------------------------------------------

LAYOUT = LatentLayout(16, 16, 4)
STORED = pytest.mark.parametrize(
    "layout",
    [LAYOUT, replace(LAYOUT, fp8=LatentFp8("e4m3fn", "float32", 8))],
    ids=["as computed", "fp8"],
)


def latent_pools(far: Tensor, layout: LatentLayout) -> list[tuple[LatentView, int]]:
    """A small cache and the end of a large one with the same rows; what is added to its ids."""
    small = LatentStore(layout, 1, KEPT, torch.float32).views[0]
    numbers = randn(len(small.rows) - 1, layout.width)
    small.write(torch.arange(len(numbers)), numbers[:, :16], numbers[:, 16:])
    data, width = far.view(small.rows.dtype), small.rows.shape[1]
    cells = len(data) // width - 1
    rows = data[: (cells + 1) * width].view(-1, width)
    blocks = cells // layout.block_size
    last = (blocks - KEPT) * layout.block_size
    rows[last : last + len(small.rows) - 1] = small.rows[:-1]
    return [(small, 0), (LatentView(rows, layout, cells), blocks - KEPT)]


def equal(made: list[Any]) -> None:
    one, two = made
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@STORED
def test_attention_over_the_last_blocks(far: Tensor, layout: LatentLayout) -> None:
    lengths, ids = [11, 5], [[7, 2, 5], [3, 6]]
    positions = torch.tensor([[10, 0, 7, -1], [4, 1, -1, -1]])
    q = randn(2, 3, LAYOUT.width, seed=1)
    for op in cpu_or_triton("mla_decode"):
        made = []
        for view, first in latent_pools(far, layout):
            rows = DecodeRows(lengths, [[first + b for b in each] for each in ids])
            made.append(op.run(q, view, op.prepare(rows, view, FULL, 3), softmax_scale=0.2))
        equal(made)
    for op in cpu_or_triton("sparse_mla"):
        made = []
        for view, first in latent_pools(far, layout):
            runs = (Run([first + b for b in each], n) for each, n in zip(ids, lengths, strict=True))
            prepared = op.prepare(SparseRows(tuple(runs)), view, FULL)
            made.append(op.run(q, view, prepared, positions, softmax_scale=0.2))
        equal(made)


@STORED
def test_prefill_over_the_last_blocks(far: Tensor, layout: LatentLayout) -> None:
    heads = HeadWeights(randn(2, 16, 8, seed=3), randn(2, 8, 16, seed=4))
    q = randn(18, 2, 24, seed=5)
    made = []
    for view, first in latent_pools(far, layout):
        row = PrefillRow(1, 18, [first + b for b in (7, 2, 5, 3, 1)])
        out = torch.full((18, 2, 8), torch.nan)
        parts = [PrefillSlice(slice(0, 18), row)]
        given = mla_prefill.prepare(parts, view, HeadDims(2, 8, 8), mla_decode)
        mla_prefill.run(q[..., :8], q[..., 8:], view, given, heads, out, softmax_scale=0.2)
        made.append([out])
    equal(made)


@STORED
def test_rows_are_written_into_the_last_blocks(far: Tensor, layout: LatentLayout) -> None:
    cells, angles = torch.tensor([29, 6, 31]), randn(3, 8, seed=6)
    options = {"norm": randn(16), "eps": 0.1, "cos": angles.cos(), "sin": angles.sin(),
               "pairing": "interleaved", "parts": PARTS}  # fmt: skip
    made = []
    for view, first in latent_pools(far, layout):
        there = cells + first * LAYOUT.block_size
        given = randn(3, 16, seed=1), randn(3, 16, seed=2), randn(3, 2, 16, seed=3)
        out = latent_write.run(*given, view, there, **options)
        made.append([out[..., 16:], view.rows[there]])
    equal(made)


def index_pools(far: Tensor, layout: IndexLayout) -> list[tuple[IndexView, int]]:
    small = IndexStore(layout, 1, KEPT).views[0]
    small.write(torch.arange(KEPT * layout.block_size), randn(KEPT * layout.block_size, 16))
    data = far.view(torch.uint8)
    blocks = len(data) // layout.block_bytes
    data = data[: blocks * layout.block_bytes]
    data[(blocks - KEPT) * layout.block_bytes :] = small.bytes
    return [(small, 0), (IndexView(data, layout, small.offsets), blocks - KEPT)]


@pytest.mark.parametrize("kind", INDEX_LAYOUTS)
@pytest.mark.parametrize("storage", ["float32", "e4m3fn"])
def test_keys_of_the_last_blocks(far: Tensor, storage: str, kind: str) -> None:
    layout = IndexLayout(16, 16, storage, kind)
    cells, one = torch.tensor([21, 127, 3]), torch.ones(16)
    rotation = {
        "cos": torch.ones(3, 2),
        "sin": torch.zeros(3, 2),
        "pairing": "interleaved",
        "rope": None,
    }
    q, weights = randn(2, 2, 16, seed=1), randn(2, 2, seed=2)
    made: list[list[Tensor]] = []
    written = []
    for view, first in index_pools(far, layout):
        runs = SparseRows((Run([first + 7, first + 2], 30), Run([first + 5], 9)))
        table = Table.of(runs)
        captured = Table(table.blocks.int(), table.run, table.lengths.int())
        made.append([])
        for rows in (runs, captured):
            prepared = index_scores.prepare(rows, view, FULL, topk=0)
            scores = index_scores.run(q, weights, view, prepared)
            made[-1] += [scores[0, :30], scores[1, :9]]
        there = cells + first * layout.block_size
        index_write.run(randn(3, 16), view, there, norm=one, bias=one, eps=0.1, **rotation)
        written.append([view.read(there)])
    equal(made)
    equal(written)


# -- slots -----------------------------------------------------------------------------


def state_pools(far: Tensor) -> list[tuple[StateView, int]]:
    small = StateStore(1, KEPT, heads=1, dk=16, dv=16, dtype=torch.float32, tail=0).views[0]
    small.state[:] = randn(*small.state.shape)
    slots = NUMBERS // 256
    state = far[: slots * 256].view(slots, 1, 16, 16)
    state[-KEPT:] = small.state
    none = torch.empty(slots, 1, 0, 16)
    return [(small, 0), (StateView(state, none, none), slots - KEPT)]


@pytest.mark.parametrize("walks", [1, 5])
def test_states_of_the_last_slots(far: Tensor, walks: int) -> None:
    """Decode, prefill in one walk, and prefill in several, between which states are summed up."""
    given = {"slopes": torch.tensor([0.1]), "scale": 0.3}
    decode = DecodeLaunch(16, 4)
    prefill = PrefillLaunch(16, 16, 4, 1, 1 if walks == 1 else 264)
    assert prefill.walk_chunks(1, 16, [80]) * walks == 5
    made = []
    for view, first in state_pools(far):
        q, k, v = (randn(80, 1, 16, seed=i) for i in range(3))
        rows = [StateRow(9, first + 1, first + 2, ((10, first + 3),))]
        one = lightning.decode(
            q[:1], k[:1], v[:1], view, lightning.prepare(rows), launch=decode, **given
        )
        row = StateRow(7, first + 4, first + 5, ((50, first + 6),))
        parts = [(slice(0, 80), row)]
        prepared = lightning.prepare_prefill(parts)
        out = lightning.prefill(q, k, v, view, prepared, launch=prefill, **given)
        made.append([one, out, view.state[first + 1 : first + 7]])
    equal(made)


# -- rows ------------------------------------------------------------------------------

APART = (1 << 30) + 16


def spread(far: Tensor, x: Tensor) -> Tensor:
    """The same rows, the third of them out of reach of 32 bits."""
    width = x[0].numel()
    rows = far.as_strided((len(x), width), (APART, 1))
    rows[:] = x.reshape(len(x), width)
    return far.as_strided(x.shape, (APART, *x.stride()[1:]))


ANGLES = {"cos": randn(2, 4, seed=8)[:1].expand(3, 4), "sin": randn(2, 4, seed=9)[:1].expand(3, 4)}
EXPERTS = experts.pack(randn(4, 16, 16, seed=1), randn(4, 16, 8, seed=2), None)
ROUTER = route.pack(randn(12, 16, seed=7), torch.float32, None)
PER_TOKEN: dict[str, Callable[[Tensor], Any]] = {
    "rms_norm": lambda x: rms_norm.run(x, torch.ones(48), 0.1),
    "rope": lambda x: rope.run(x.view(3, 6, 8), *ANGLES.values(), "half-split"),
    "qkv_prepare": lambda x: qkv_prepare.run(
        x, heads=2, silu=True, norms=None, eps=0.1, rope=None, parts=PARTS
    ),
    "gated_norm": lambda x: gated_norm.run(
        x, x, weight=torch.ones(48), groups=3, eps=0.1, parts=PARTS
    ),
    "index queries": lambda x: index_write.rotate(
        x.view(3, 6, 8), **ANGLES, pairing="interleaved", rope=None
    ),
    "experts": lambda x: experts.run(
        x[:, :16], torch.tensor([[0], [3], [2]]), torch.ones(3, 1), EXPERTS, None
    ),
    "sorted experts": lambda x: experts.run_with(
        experts.ExpertsLaunch("sorted", experts.GemmTiles(16, 16), experts.GemmTiles(16, 16)),
        x[:, :16], torch.tensor([[0], [3], [2]]), torch.ones(3, 1), EXPERTS,
    ),
    "route": lambda x: route.choose_with(
        route.RouteLaunch(16, 16, 16, 16), x[:, :16], ROUTER, None, ROUTERS["v2 greedy"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PER_TOKEN)
def test_rows_far_apart(far: Tensor, what: str) -> None:
    x, run = randn(3, 48, seed=3), PER_TOKEN[what]
    near, there = (run(each) for each in (x, spread(far, x)))
    equal([[each] if isinstance(each, Tensor) else each for each in (near, there)])
