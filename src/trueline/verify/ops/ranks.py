"""Bits of an op on a rank that holds some of the columns, heads or experts: those of one that holds
all. What batch-invariant mode needs on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.cache.layout import IndexLayout
from trueline.cache.state import StateStore
from trueline.ops.batched_gemm import BatchedGemm
from trueline.ops.capabilities import Opaque
from trueline.ops.experts import InvariantExperts
from trueline.ops.lightning import LightningAttention
from trueline.ops.linear import LinearOp
from trueline.ops.mla_decode import MLADecodeOp, Tiling
from trueline.ops.mlp import InvariantMLP
from trueline.ops.sparse_mla import SparseMLA
from trueline.verify import sparse
from trueline.verify.ops import lightning as states
from trueline.verify.ops import sink
from trueline.verify.ops.data import L, R, paged, randn, require, torch_linear

FIXED = Tiling(64, full=True)
SCALE = 0.21
HEADS = 12


def cuts(total: int) -> list[slice]:
    """What each rank holds, for any number of ranks."""
    sizes = [size for size in range(2, total + 1) if total % size == 0]
    each = [total // size for size in sizes]
    return [slice(at, at + n) for n in each for at in range(0, total, n)]


def linear(op: LinearOp) -> None:
    for columns, inner in ((24, 37), (80, 88), (200, 67), (512, 256)):
        weight = randn(columns, inner)
        for rows in (1, 3, 20):
            x = randn(rows, inner, seed=1)
            whole = op.run(x, op.pack(weight))
            for part in cuts(columns):
                mine = op.run(x, op.pack(weight[part]))
                what = f"linear, {columns} columns: the bits of columns {part.start}:{part.stop}"
                require(torch.equal(mine, whole[:, part]), what)


def batched_gemm(op: BatchedGemm[Opaque]) -> None:
    weight, x = randn(HEADS, 37, 19), randn(9, HEADS, 19, seed=1)
    whole = op.run(x, op.pack(weight, torch_linear(), True))
    for part in cuts(HEADS):
        mine = op.run(x[:, part], op.pack(weight[part], torch_linear(), True))
        require(torch.equal(mine, whole[:, part]), "batched_gemm: a head's bits depend on others")


def mlp(op: InvariantMLP[Opaque]) -> None:
    """A part of the width first, then some rows over all of it."""
    hidden, width = 36, 60
    gate, up, down = (
        randn(width, hidden),
        randn(width, hidden, seed=1),
        randn(hidden, width, seed=2),
    )
    for rows in (1, 8, 21):
        x = 40 * randn(rows, hidden, seed=3)
        whole = op.run(x, op.pack(torch.cat((gate, up)), down, torch_linear()), torch_linear())
        for size in (1, 2, 4, 12):
            w, h = width // size, hidden // size
            packed = [
                op.pack(
                    torch.cat((gate[i * w : (i + 1) * w], up[i * w : (i + 1) * w])),
                    down[i * h : (i + 1) * h],
                    torch_linear(),
                )
                for i in range(size)
            ]
            middle = torch.cat([op.middle(x, each, torch_linear()) for each in packed], 1)
            ours = torch.cat([op.down(middle, each, torch_linear()) for each in packed], 1)
            require(torch.equal(ours.to(x.dtype), whole), f"mlp: bits on {size} ranks")


def experts(op: InvariantExperts[Opaque]) -> None:
    """In the order of a token's ids, whichever ranks hold them; and with a part of every expert's
    width first, then some rows over all of it."""
    count, top, hidden, width = 12, 5, 36, 24
    gate_up, down = randn(count, 2 * width, hidden) / 5, randn(count, hidden, width, seed=1) / 4
    linear = torch_linear()
    for tokens in (1, 2, 33):
        x, weights = randn(tokens, hidden, seed=2), randn(tokens, top, seed=3).abs()
        ids = randn(tokens, count, seed=4).argsort(1)[:, :top]
        whole = op.run(x, ids, weights, op.pack(gate_up, down, linear), linear)
        for size in (1, 2, 4, 12):
            n, each = count // size, []
            for at in range(0, count, n):
                mine = op.pack(gate_up[at : at + n], down[at : at + n], linear)
                each.append(op.down(op.middle(x, ids, mine, linear, at), ids, mine, linear, at))
            ours = op.combine(torch.stack(each).sum(0), weights).to(x.dtype)
            require(torch.equal(ours, whole), f"experts: bits on {size} ranks, whole")
            ranks = [op.pack(*part, linear) for part in _by_width(gate_up, down, size)]
            middle = torch.cat([op.middle(x, ids, mine, linear) for mine in ranks], 2)
            given = [op.combine(op.down(middle, ids, m, linear), weights) for m in ranks]
            ours = torch.cat(given, 1).to(x.dtype)
            require(torch.equal(ours, whole), f"experts: bits on {size} ranks, by width")


def _by_width(gate_up: Tensor, down: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each rank: its part of the width of gate and up, its rows of down."""
    gates, ups = (half.chunk(size, 1) for half in gate_up.chunk(2, 1))
    for gate, up, rows in zip(gates, ups, down.chunk(size, 1), strict=True):
        yield torch.cat((gate, up), 1), rows.contiguous()


def mla_decode(op: MLADecodeOp) -> None:
    view, rows = paged([1, 64, 65, 200, 7], 3)
    q = randn(5, HEADS, L + R, seed=4)
    whole = op.run(q, view, op.prepare(rows, view, FIXED, HEADS), softmax_scale=SCALE)
    for part in cuts(HEADS):
        prepared = op.prepare(rows, view, FIXED, part.stop - part.start)
        mine = op.run(q[:, part], view, prepared, softmax_scale=SCALE)
        _same_heads("mla_decode", mine, whole, part)


def sparse_mla(op: SparseMLA[Opaque]) -> None:
    step = sparse.mixed_step(IndexLayout(sparse.DIM, 16, "float32", "rows"))
    q = randn(len(step.rows.lengths), HEADS, L + R, seed=9)
    prepared = op.prepare(step.rows, step.latent, FIXED)
    for positions in sparse.selections(step).values():
        whole = op.run(q, step.latent, prepared, positions, softmax_scale=SCALE)
        for part in cuts(HEADS):
            mine = op.run(q[:, part], step.latent, prepared, positions, softmax_scale=SCALE)
            _same_heads("sparse_mla", mine, whole, part)


def sink_attention(op: sink.SinkOp) -> None:
    step = sink.sink_step(sink.Shape(7, 2, topk=70), [(0, 9), (150, 1), (64, 3)])
    q, sinks = randn(step.num_tokens, HEADS, L + R, seed=4), sink.head_sinks(HEADS)
    whole = step.run(op, q, sinks, FIXED)
    for part in cuts(HEADS):
        mine = step.run(op, q[:, part], sinks[part], FIXED)
        _same_heads("sink_attention", (mine,), (whole,), part)


def _same_heads(
    what: str, mine: tuple[Tensor, ...], whole: tuple[Tensor, ...], part: slice
) -> None:
    same = all(torch.equal(ours, all_of[:, part]) for ours, all_of in zip(mine, whole, strict=True))
    require(same, f"{what}: the bits of heads {part.start}:{part.stop} of {HEADS}")


def lightning(op: LightningAttention[Opaque, Opaque]) -> None:
    """Outputs and slots of each head alone, in one go and by decode."""
    t, length = states.tokens(), states.LENGTH
    for tail in states.FIXED:
        for chunk in (0, length):
            view = states.slots(tail, 2)
            whole = states.run(op, view, t, 0, length, chunk)
            for h in range(states.HEADS):
                some = slice(h, h + 1)
                one = states.Tokens(t.q[:, some], t.k[:, some], t.v[:, some], t.slopes[some])
                store = StateStore(
                    1, 2, heads=1, dk=states.DK, dv=states.DV, dtype=torch.float32, tail=tail
                )
                mine = states.run(op, store.views[0], one, 0, length, chunk)
                what = f"lightning, tail {tail}: the bits of head {h}"
                require(torch.equal(mine, whole[:, some]), what)
                for ours, theirs in zip(store.views[0].parts, view.parts, strict=True):
                    require(torch.equal(ours[1], theirs[1, some]), f"{what} in the slot")
