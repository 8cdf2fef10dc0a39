"""Latent attention against its float64 references: ragged, empty and long contexts, every tiling
and form."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore
from trueline.ops.mla_decode import DecodeRows, DecodeTable, Tiling
from trueline.ops.mla_decode import reference as decode_reference
from trueline.ops.mla_prefill import Form, PrefillRow
from trueline.ops.mla_prefill import reference as prefill_reference
from trueline.verify.ops import chosen
from trueline.verify.ops.data import (
    GATE,
    SMALL,
    WIDE,
    Dims,
    H,
    L,
    R,
    close,
    paged,
    randn,
    require,
    rounded,
)

PREFILL_GATE = 6e-6
"""Needles make scores of 50 and more."""
PREFILL_ROUNDINGS = 16
"""The same scores from keys, or queries, that were rounded when they were made."""
LSE_GATE = 2e-5
SCALE = 0.21
FIXED = Tiling(64, full=True)
TILINGS = (Tiling(1024, full=False), Tiling(16, full=False), FIXED)
SHAPES = ((1, 1), (3, H), (3, 19), (16, 8), (64, H))
"""Block sizes and heads."""
WIDE_GATE = 1.2e-5
"""Scores are sums of twelve times as many products."""
WIDE_SHAPES = ((1, 40, 5), (16, 128, 0), (64, 64, 16))
"""Block sizes, heads, and numbers between the queries of two heads: pieces of 16 can be copied."""
PREFILL_BLOCKS = (1, 5, 64)
PREFILLS = ((0, 1), (0, 40), (17, 1), (30, 25), (600, 3), (1, 700), (2030, 30))
"""Positions before, and new ones."""
WIDE_PREFILLS = ((0, 1), (0, 40), (63, 130), (1, 300), (300, 70))


def mla_decode(op: Any, dtype: torch.dtype = torch.float32) -> None:
    for block_size, heads in SHAPES:
        view, rows = paged([1, 2, 63, 64, 65, 130, 0, 300], block_size, dtype=dtype)
        q = randn(8, heads, L + R, seed=9).to(dtype)
        exact = decode_reference.run(q.double(), view, rows, softmax_scale=SCALE)
        for tiling in TILINGS:
            what = f"mla_decode, {heads} heads, blocks of {block_size}, tiles of {tiling.size}"
            prepared = op.prepare(rows, view, tiling, heads)
            same_attention(what, op.run(q, view, prepared, softmax_scale=SCALE), exact, dtype)


def mla_decode_wide(op: Any, dtype: torch.dtype = torch.float32) -> None:
    for block_size, heads, apart in WIDE_SHAPES:
        view, rows = paged([1, 64, 129, 0, 300, 65], block_size, dtype=dtype, dims=WIDE)
        q = randn(6, heads, WIDE.width + apart, seed=9).to(dtype)[..., apart:]
        exact = decode_reference.run(q.double(), view, rows, softmax_scale=WIDE.scale)
        prepared = op.prepare(rows, view, TILINGS[0], heads)
        ours = op.run(q, view, prepared, softmax_scale=WIDE.scale)
        what = f"mla_decode, {heads} heads over {WIDE.cached}, {block_size=}, {apart} apart"
        same_attention(what, ours, exact, dtype, WIDE_GATE)


def same_attention(
    what: str,
    ours: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    gate: float = GATE,
) -> None:
    (out, lse), (exact_out, exact_lse) = ours, exact
    require(out.dtype == dtype, f"{what}: {out.dtype} for {dtype}")
    close(what, out, exact_out, rounded(dtype, 2, gate))
    same = (lse == exact_lse) | ((lse - exact_lse).abs() <= LSE_GATE)
    require(bool(same.all()), f"{what}: lse differs")
    empty = exact_lse == -torch.inf
    require(bool((out[empty] == 0).all()), f"{what}: a row without keys is not zero")


def decode_table(op: Any, dtype: torch.dtype = torch.float32) -> None:
    """What a captured graph sees: a table with room to spare, padded rows, and other contexts in
    the same buffers later. The null block, at which all that is spare points, holds NaN."""
    heads, block_size = 15, 16
    lengths, blocks = torch.zeros(7, dtype=torch.int32), torch.zeros(7, 40, dtype=torch.int32)
    table = DecodeTable(lengths, blocks)
    for contexts in ([600, 1, 0, 33], [64], [0], [5, 128, 640, 7, 31, 32, 500]):
        padding = [0] * (7 - len(contexts))
        view, rows = paged([*contexts, *padding], block_size, seed=len(contexts), dtype=dtype)
        now = rows.table(blocks.device)
        blocks.zero_()[:, : now.blocks.shape[1]] = now.blocks
        lengths.copy_(now.lengths)
        q = randn(7, heads, L + R, seed=9).to(dtype)
        exact = decode_reference.run(q.double(), view, rows, softmax_scale=SCALE)
        ours = op.run(q, view, op.prepare(table, view, TILINGS[0], heads), softmax_scale=SCALE)
        same_attention(f"mla_decode, a table with {contexts}", ours, exact, dtype)


def natural_lse(op: Any, dtype: torch.dtype = torch.float32) -> None:
    """Two keys with known scores: ln(e^a + e^b)."""
    store = LatentStore(LatentLayout(2, 2, 1), 1, 3, dtype)
    view = store.views[0]
    keys = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    view.write(torch.tensor([1, 2]), keys[:, :2], keys[:, 2:])
    q = torch.tensor([[[1.0, 1.0, 0, 0]]], dtype=dtype)
    prepared = op.prepare(DecodeRows([2], [[1, 2]]), view, TILINGS[0], 1)
    _, lse = op.run(q, view, prepared, softmax_scale=0.5)
    off = abs(lse.item() - torch.tensor([0.5, 1.0]).logsumexp(0).item())
    require(off <= 1e-6, f"mla_decode: lse is not natural: off by {off:.2g}")


def mla_decode_bits(op: Any) -> None:
    lengths = [1, 64, 65, 200, 130, 7, 300, 2]
    view, rows = paged(lengths, 3)
    q = randn(8, H, L + R, seed=4)
    whole, _ = op.run(q, view, op.prepare(rows, view, FIXED, H), softmax_scale=SCALE)
    for some in ([3], [0, 7], [6, 2, 4], [5, 6, 7, 0, 1, 2, 3, 4]):
        part = DecodeRows([lengths[i] for i in some], [rows.block_ids[i] for i in some])
        out, _ = op.run(q[some], view, op.prepare(part, view, FIXED, H), softmax_scale=SCALE)
        require(torch.equal(out, whole[some]), "mla_decode: a row's bits depend on its company")


def mla_prefill(op: Any, dtype: torch.dtype = torch.float32) -> None:
    for block_size in PREFILL_BLOCKS:
        prefills(op, dtype, SMALL, H, block_size, PREFILLS)
    if hasattr(op, "run_chosen"):
        chosen.chosen(op, dtype)


def mla_prefill_wide(op: Any, dtype: torch.dtype = torch.float32) -> None:
    prefills(op, dtype, WIDE, 2, 16, WIDE_PREFILLS)
    if hasattr(op, "run_chosen"):
        chosen.chosen(op, dtype, WIDE)


def prefills(
    op: Any,
    dtype: torch.dtype,
    dims: Dims,
    count_heads: int,
    block_size: int,
    shapes: tuple[tuple[int, int], ...],
) -> None:
    heads = dims.weights(count_heads, dtype)
    for start, count in shapes:
        view, rows = paged([start + count], block_size, dtype=dtype, dims=dims)
        q = randn(count, count_heads, dims.nope + dims.rope, seed=7).to(dtype)
        blocks = rows.block_ids[0]
        last = min(count, 50)  # the reference is slow
        exact = prefill_reference.run(
            q[-last:].double(), view, PrefillRow(start + count - last, last, blocks), heads,
            softmax_scale=dims.scale, form="expanded",
        )  # fmt: skip
        for form in get_args(Form):
            ours = op.run(
                q, view, PrefillRow(start, count, blocks), heads,
                softmax_scale=dims.scale, form=form,
            )  # fmt: skip
            what = f"mla_prefill, {form}, {start} + {count}, {block_size=}, {dims}"
            close(what, ours[-last:], exact, rounded(dtype, PREFILL_ROUNDINGS, PREFILL_GATE))
