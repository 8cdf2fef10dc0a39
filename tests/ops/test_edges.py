"""Every residue of every dim modulo the panels, lanes and groups of the CPU's kernels: rows,
columns, inner numbers, heads, experts. What an edge loses is whole terms; what float32 may lose is
bounded by the number of terms and their size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from implementations import every, runnable
from trueline.cache.index import IndexStore
from trueline.cache.layout import IndexLayout
from trueline.ops.compress import cpu as compress_cpu
from trueline.ops.experts import reference as experts_reference
from trueline.ops.index_scores import reference as scores_reference
from trueline.ops.linear import torch_mm
from trueline.ops.mla_decode import Tiling
from trueline.ops.mla_decode import reference as decode_reference
from trueline.ops.route import reference as route_reference
from trueline.ops.sink_attention import cpu as sink_cpu
from trueline.ops.sparse_rows import Run, SparseRows
from trueline.spec.feedforward import RouterSpec
from trueline.verify.ops import compress, paged, randn, sink
from trueline.verify.ops import hyper_connections as streams
from trueline.verify.ops.data import Dims, close

PARTS = {
    "queries that share keys": (sink_cpu, {"QUERIES": (1, 3)}, sink.sink_attention),
    "entries that queries share": (sink_cpu, {"SCORES": 1, "BUCKET": 2}, sink.sink_attention),
    "long lists": (sink_cpu, {"QUERIES": (1, 3), "MASKED": 0}, sink.sink_attention),
    "windows that are pooled": (compress_cpu, {"AT_ONCE": 1}, compress.compress),
}
"""Of compressed attention: what ops do some at a time, here so few that steps have several."""

EPS = torch.finfo(torch.float32).eps
WIDEST = 66
"""Two panels of 32, and a little more; with 16 columns in a panel, four."""


def within(ours: Tensor, exact: Tensor, size: Tensor, terms: int) -> None:
    """Every number, by what its terms add up to without signs."""
    assert ours.shape == exact.shape
    off = (ours.double() - exact).abs()
    assert bool((off <= terms * EPS * size).all()), f"off by {float(off.max()):.2g}"


def shapes() -> Iterator[tuple[int, int, int]]:
    """Rows, columns, inner: each through all its residues, the others anywhere."""
    for n in range(1, WIDEST + 1):
        yield 2 + n % 9, n, 5  # two rows at least: one may overwrite the beginning of the next
        yield 3, 7 + n % 40, n
        if n < 20:
            yield n, 17, 6


@every("linear")
def test_products(module: str) -> None:
    op = runnable("linear", module)
    for rows, columns, inner in shapes():
        weight, x = randn(columns, inner), randn(rows, inner, seed=1)
        exact = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        within(op.run(x, op.pack(weight)), exact, size, inner + 4)


def test_products_are_made_in_blocks_of_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries on some CPUs divide the sums of more rows in another way, and compute what is left
    over of a tile in another."""
    mm, asked = torch.mm, []

    def counted(left: Tensor, right: Tensor) -> Tensor:
        asked.append(right.shape[1])
        return mm(left, right)

    monkeypatch.setattr(torch, "mm", counted)
    weight = randn(24, 1024)
    packed = torch_mm.pack(weight)
    for rows in (torch_mm.MOST_ROWS, torch_mm.MOST_ROWS + 1, 2 * torch_mm.MOST_ROWS + 40):
        x = randn(rows, 1024, seed=1)
        whole = torch_mm.run(x, packed)
        assert max(asked) <= torch_mm.MOST_ROWS
        assert {number % torch_mm.TILE for number in asked} == {0}
        assert all(torch.equal(torch_mm.run(x[i : i + 9], packed), whole[i : i + 9])
                   for i in range(0, rows, 9))  # fmt: skip
        exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        within(whole, exact, size, 1024 + 4)


@every("batched_gemm")
def test_products_by_head(module: str) -> None:
    op = runnable("batched_gemm", module)
    for rows, columns, inner in shapes():
        heads = 1 + columns % 5
        weight, x = randn(heads, columns, inner), randn(rows, heads, inner, seed=1)
        exact = torch.einsum("nhi,hoi->nho", x.double(), weight.double())
        size = torch.einsum("nhi,hoi->nho", x.double().abs(), weight.double().abs())
        within(op.run(x, op.pack(weight, torch_mm, True)), exact, size, inner + 4)


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, and what its terms add up to without signs: silu is no larger than its
    argument."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    gate, up = (x @ gate_up.T).chunk(2, -1)
    size, other = (x.abs() @ gate_up.abs().T).chunk(2, -1)
    out = (gate * torch.sigmoid(gate) * up) @ down.T
    return out, ((1 + size) * other) @ down.abs().T


@every("mlp")
def test_mlp(module: str) -> None:
    op = runnable("mlp", module)
    for rows, hidden, width in shapes():
        gate_up, down = randn(2 * width, hidden) / 4, randn(hidden, width, seed=1)
        x = randn(rows, hidden, seed=2)
        exact, size = gated(x, gate_up, down)
        within(op.run(x, op.pack(gate_up, down, torch_mm), torch_mm), exact, size,
               2 * hidden + width + 16)  # fmt: skip


@every("experts")
def test_experts(module: str) -> None:
    """From none to many tokens of each of them; some held elsewhere."""
    op = runnable("experts", module)
    for rows, hidden, width in shapes():
        count, top = 1 + hidden % 5, 1 + width % 3
        gate_up, down = randn(count, 2 * width, hidden) / 4, randn(count, hidden, width, seed=1)
        x, weights = randn(rows, hidden, seed=2), randn(rows, top, seed=3)
        ids = randn(rows, count + 4, seed=4).argsort(1)[:, :top]
        given = experts_reference.pack(gate_up, down, None)
        exact = experts_reference.run(x.double(), ids, weights.double(), given, None, 2)
        size = torch.zeros(rows, hidden, dtype=torch.float64)
        for expert in range(count):
            share = (weights.abs() * (ids == expert + 2)).sum(1, keepdim=True)
            size += share * gated(x, gate_up[expert], down[expert])[1]
        ours = op.run(x, ids, weights, op.pack(gate_up, down, torch_mm), torch_mm, 2)
        within(ours, exact, size, 2 * hidden + width + top + 16)


@every("rms_norm")
def test_norms(module: str) -> None:
    op = runnable("rms_norm", module)
    for width in range(1, WIDEST + 1):
        x, weight = randn(1 + width % 3, width), randn(width, seed=1)
        wide = x.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
        within(op.run(x, weight, 0.1), exact, exact.abs(), width + 8)


@every("rope")
def test_rotations(module: str) -> None:
    op = runnable("rope", module)
    for half in range(1, 35):
        x, angle = randn(1 + half % 3, 1 + half % 7, 2 * half), randn(1 + half % 3, half, seed=1)
        cos, sin = angle.cos(), angle.sin()
        for pairing in ("interleaved", "half-split"):
            split = x.double().unflatten(-1, (half, 2) if pairing == "interleaved" else (2, half))
            a, b = split.unbind(-1 if pairing == "interleaved" else -2)
            c, s = cos.double()[:, None], sin.double()[:, None]
            exact = torch.stack(
                (a * c - b * s, b * c + a * s), -1 if pairing == "interleaved" else -2
            )
            size = (a.abs() + b.abs())[..., None].expand(*a.shape, 2)
            size = size if pairing == "interleaved" else size.transpose(-1, -2)
            within(op.run(x, cos, sin, pairing), exact.flatten(-2), size.flatten(-2), 4)


@every("route")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_choices(module: str, scoring: str) -> None:
    """Any number of experts, groups and choices."""
    op = runnable("route", module)
    for count in range(1, 41):
        for groups in (1, 2, 3, 5):
            kept, size = (groups + 1) // 2, count // groups
            if count % groups or (groups > 1 and size < 2):
                continue
            score = None if groups == 1 else "max" if count % 2 else "top2_sum"
            router = RouterSpec(
                scoring=scoring, correction_bias=True, num_groups=groups, top_groups=kept,
                group_score=score, top_k=min(1 + count % 7, kept * size),
                renormalise=bool(count % 3), scaling_factor=1.5,
            )  # fmt: skip
            logits, bias = randn(1 + count % 4, count, seed=count), randn(count, seed=1) / 4
            ids, weights = op.run(logits, bias, router)
            exact_ids, exact = route_reference.run(logits.double(), bias, router)
            assert torch.equal(ids, exact_ids)
            within(weights, exact, exact.abs(), count + 32)


EDGE_GATE = 1e-4
"""Scores of a few dozen terms err by less than 1e-5, and so do their exponentials; a position or a
channel that is missed or counted twice changes a row of a few hundred by more than 1e-3."""


@every("mla_decode")
def test_attention(module: str) -> None:
    """Heads by groups of 8, channels by vectors and pairs of them, contexts by tiles of 64 and by
    groups of three keys; blocks of any size."""
    op = runnable("mla_decode", module)
    lengths = [0, 1, 2, 3, 4, 62, 63, 64, 65, 66, 67, 126, 127, 128, 129, 130]
    for n in range(1, 36):
        dims, heads, block = Dims(latent=n, rope=1 + 5 * n % 18), 1 + n % 18, 1 + 7 * n % 70
        view, rows = paged(lengths, block, dims=dims)
        q = randn(len(lengths), heads, dims.width, seed=n) / dims.width**0.5
        exact, exact_lse = decode_reference.run(q.double(), view, rows, softmax_scale=0.3)
        prepared = op.prepare(rows, view, Tiling(64, full=True), heads)
        ours, lse = op.run(q, view, prepared, softmax_scale=0.3)
        close(f"{dims}, {heads} heads, blocks of {block}", ours[1:], exact[1:], EDGE_GATE)
        assert not ours[0].any()
        assert torch.allclose(lse[1:].double(), exact_lse[1:].double(), atol=EDGE_GATE, rtol=0)


@every("sink_attention")
def test_attention_with_sinks(module: str) -> None:
    """The same of both lists of keys: windows and entries of every length around tiles, some of
    them none. Held to what its numbers may lose."""
    op = runnable("sink_attention", module)
    for n in range(1, 36):
        size, ratio = (1, 2, 3, 63, 64, 65, 127, 128, 129)[n % 9], n % 4
        topk = n % 3 * (3 + n) if ratio else 0
        shape = sink.Shape(size, ratio, 1 + 7 * n % 20, 1 + n % 5, topk)
        around = max(ratio, 1) * (64 - n % 3)
        step = sink.sink_step(shape, [(0, 2), (size, 1), (around, 3)], dims=(n, 2 + 2 * (n % 9)))
        dtype, heads = torch.float32, 1 + n % 18
        sink.compare(op, f"{shape}, {n}, {heads}", step, heads, dtype, (sink.FULL,))


@every("hyper_connections")
def test_streams(module: str) -> None:
    """Streams of any number and width; tokens by as many as share a reading of the weights."""
    op = runnable("hyper_connections", module)
    for n in range(1, 36):
        shape = (1 + n % 4, n, 1 + n % 11, 1e-6, 1e-6, 1 + n % 3)
        streams.hyper_connections(op, shapes=[shape])


@every("index_scores")
def test_scores(module: str) -> None:
    """Heads by groups of four, channels and keys by vectors."""
    op = runnable("index_scores", module)
    for n in range(1, 36):
        heads, dim, size = 1 + n % 9, n, 1 + 3 * n % 40
        store = IndexStore(IndexLayout(dim, size, "float32", "rows"), 1, 130 // size + 3)
        store.poison(range(130 // size + 3))
        view, blocks = store.views[0], list(range(130 // size + 1, 0, -1))
        keys, at = randn(130, dim, seed=n), torch.arange(130)
        view.write(torch.tensor(blocks)[at // size] * size + at % size, keys)
        first = 60 + n % 9
        rows = SparseRows((Run(blocks, first, 1 + n % 5), Run(blocks, 130 - n % 4)))
        q = randn(len(rows.lengths), heads, dim, seed=1)
        weights = randn(len(rows.lengths), heads, seed=2)
        tiling = Tiling(64, full=True)
        ours = op.run(q, weights, view, op.prepare(rows, view, tiling, topk=0))
        exact = scores_reference.run(q, weights, view, (rows, 0))
        products = torch.einsum("nhd,kd->nhk", q.double().abs(), keys.double().abs())
        size_of = torch.einsum("nh,nhk->nk", weights.double().abs(), products)
        for row, length in enumerate(rows.lengths):
            part = row, slice(length)
            within(ours[part], exact[part], size_of[part], dim + heads + 4)


@pytest.mark.parametrize("what", PARTS)
def test_steps_in_parts(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, few, check = PARTS[what]
    for name, value in few.items():
        monkeypatch.setattr(op, name, value)
    check(op)
