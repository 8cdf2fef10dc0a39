"""Latent attention against its float64 references: ragged, empty and long contexts, every tiling
and form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, get_args

import torch
from torch import Tensor

from trueline.cache.kinds.latent import PrefillSlice
from trueline.cache.layout import LatentFp8, LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.capabilities import Opaque
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import DecodeRows, DecodeTable, MLADecodeOp, Tiling
from trueline.ops.mla_prefill import Form, HeadWeights, MaskedPrefill, MLAPrefill, PrefillRow
from trueline.verify.bounds import AROUND, Attended, rounding
from trueline.verify.ops import attended, chosen
from trueline.verify.ops.data import (
    SMALL,
    WIDE,
    Dims,
    H,
    L,
    R,
    decode_beside,
    paged,
    randn,
    require,
    within,
)

SCALE = 0.21
FIXED = Tiling(64, full=True)
TILINGS = (Tiling(1024, full=False), Tiling(16, full=False), FIXED)
SHAPES = ((1, 1), (3, H), (3, 19), (16, 8), (64, H))
"""Block sizes and heads."""
FAR_BLOCK, FAR = 16, 2100
"""Where one context is longer than any tile, twice."""
WIDE_SHAPES = ((1, 40, 5), (16, 128, 0), (64, 64, 16))
"""Block sizes, heads, and numbers between the queries of two heads: pieces of 16 can be copied."""
PREFILL_BLOCKS = (1, 5, 64)
PREFILLS = ((0, 1), (0, 40), (17, 1), (30, 25), (600, 3), (1, 700), (2030, 30))
"""Positions before, and new ones."""
WIDE_PREFILLS = ((0, 1), (0, 40), (63, 130), (1, 300), (300, 70))


def mla_decode(op: MLADecodeOp, dtype: torch.dtype = torch.float32) -> None:
    for i, (block_size, heads) in enumerate(SHAPES):
        scale = SMALL.scaled(i).scale
        longest = FAR if block_size == FAR_BLOCK else 300
        view, rows = paged([1, 2, 63, 64, 65, 130, 0, longest], block_size, dtype=dtype)
        q = randn(8, heads, L + R, seed=9).to(dtype)
        exact = attended.decode(q, view, rows, scale)
        for tiling in TILINGS:
            what = f"mla_decode, {heads} heads, blocks of {block_size}, tiles of {tiling.size}"
            prepared = op.prepare(rows, view, tiling, heads)
            same_attention(what, op.run(q, view, prepared, softmax_scale=scale), exact, dtype)


def mla_decode_wide(
    op: MLADecodeOp,
    dtype: torch.dtype = torch.float32,
    dims: Dims = WIDE,
    shapes: Sequence[tuple[int, int, int]] = WIDE_SHAPES,
) -> None:
    for block_size, heads, apart in shapes:
        view, rows = paged([1, 64, 129, 0, 300, 65], block_size, dtype=dtype, dims=dims)
        q = randn(6, heads, dims.width + apart, seed=9).to(dtype)[..., apart:]
        exact = attended.decode(q, view, rows, dims.scale)
        prepared = op.prepare(rows, view, TILINGS[0], heads)
        ours = op.run(q, view, prepared, softmax_scale=dims.scale)
        what = f"mla_decode, {heads} heads over {dims.cached}, {block_size=}, {apart} apart"
        same_attention(what, ours, exact, dtype)


def same_attention(
    what: str, ours: tuple[Tensor, Tensor], exact: Attended, dtype: torch.dtype
) -> None:
    out, lse = ours
    require(out.dtype == dtype, f"{what}: {out.dtype} for {dtype}")
    within(what, out, exact.out, exact.out_bound[..., None])
    empty = exact.lse == -torch.inf
    require(bool((lse[empty] == -torch.inf).all()), f"{what}: lse of a row without keys")
    require(bool((out[empty] == 0).all()), f"{what}: a row without keys is not zero")
    full = ~empty
    limit = exact.lse_bound[full][:, None]
    within(f"{what}: lse", lse[full][:, None], exact.lse[full][:, None], limit)


def decode_table(op: MLADecodeOp, dtype: torch.dtype = torch.float32) -> None:
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
        exact = attended.decode(q, view, rows, SCALE)
        ours = op.run(q, view, op.prepare(table, view, TILINGS[0], heads), softmax_scale=SCALE)
        same_attention(f"mla_decode, a table with {contexts}", ours, exact, dtype)


def natural_lse(op: MLADecodeOp, dtype: torch.dtype = torch.float32) -> None:
    """Two keys with known scores: ln(e^a + e^b)."""
    store = LatentStore(LatentLayout(2, 2, 1), 1, 3, dtype)
    view = store.views[0]
    keys = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    view.write(torch.tensor([1, 2]), keys[:, :2], keys[:, 2:])
    q = torch.tensor([[[1.0, 1.0, 0, 0]]], dtype=dtype)
    prepared = op.prepare(DecodeRows([2], [[1, 2]]), view, TILINGS[0], 1)
    _, lse = op.run(q, view, prepared, softmax_scale=0.5)
    exact = torch.tensor([[0.5, 1.0]], dtype=torch.float64).logsumexp(1, keepdim=True)
    limit = torch.full_like(exact, rounding(2 * AROUND))
    within("mla_decode, natural lse", lse, exact, limit)


def mla_decode_bits(op: MLADecodeOp) -> None:
    bits_of_rows(op, None)


def bits_of_rows(op: MLADecodeOp, fp8: LatentFp8 | None) -> None:
    """Over a cache in this storage."""
    lengths = [1, 64, 65, 200, 130, 7, 300, 2]
    view, rows = paged(lengths, 3, fp8=fp8)
    q = randn(8, H, L + R, seed=4)
    whole, _ = op.run(q, view, op.prepare(rows, view, FIXED, H), softmax_scale=SCALE)
    for some in ([3], [0, 7], [6, 2, 4], [5, 6, 7, 0, 1, 2, 3, 4]):
        part = DecodeRows([lengths[i] for i in some], [rows.block_ids[i] for i in some])
        out, _ = op.run(q[some], view, op.prepare(part, view, FIXED, H), softmax_scale=SCALE)
        require(torch.equal(out, whole[some]), "mla_decode: a row's bits depend on the batch")


def mla_prefill(op: MLAPrefill[Opaque], dtype: torch.dtype = torch.float32) -> None:
    for block_size in PREFILL_BLOCKS:
        prefills(op, dtype, SMALL, H, block_size, PREFILLS)
    if "run_chosen" in op.capabilities.optional:
        chosen.chosen(cast("MaskedPrefill[Opaque]", op), dtype)


def mla_prefill_wide(
    op: MLAPrefill[Opaque],
    dtype: torch.dtype = torch.float32,
    dims: Dims = WIDE,
    heads: int = 2,
    block_size: int = 16,
) -> None:
    prefills(op, dtype, dims, heads, block_size, WIDE_PREFILLS)
    if "run_chosen" in op.capabilities.optional:
        chosen.chosen(cast("MaskedPrefill[Opaque]", op), dtype, dims)


def prefills(
    op: MLAPrefill[Opaque],
    dtype: torch.dtype,
    dims: Dims,
    count_heads: int,
    block_size: int,
    shapes: tuple[tuple[int, int], ...],
) -> None:
    heads, unscaled = dims.weights(count_heads, dtype), dims
    for i, (start, count) in enumerate(shapes):
        dims = unscaled.scaled(i)
        view, rows = paged([start + count], block_size, dtype=dtype, dims=dims)
        q = randn(count, count_heads, dims.nope + dims.rope, seed=7).to(dtype)
        blocks = rows.block_ids[0]
        last = min(count, 50)  # the reference is slow
        row = PrefillRow(start + count - last, last, blocks)
        exact = attended.prefill(q[-last:], view, row, heads, dims.scale)
        what = f"mla_prefill, {start} + {count}, {block_size=}, {dims}"
        for ours in _forms(op, q, view, PrefillRow(start, count, blocks), heads, dims):
            within(what, ours[-last:], exact.out, exact.out_bound[..., None])


def _forms(
    op: MLAPrefill[Opaque],
    q: Tensor,
    view: LatentView,
    row: PrefillRow,
    heads: HeadWeights,
    dims: Dims,
) -> Iterator[Tensor]:
    """The op's output in each form."""
    count_heads = q.shape[1]
    for form in get_args(Form):
        whole = PrefillSlice(slice(0, row.count), row)
        given = dims.heads(count_heads), decode_beside()
        prepared = op.prepare([whole], view, *given, form)
        ours = q.new_full((row.count, count_heads, dims.value), torch.nan)
        op.run(
            q[..., : dims.nope], q[..., dims.nope :], view, prepared, heads, ours,
            softmax_scale=dims.scale,
        )  # fmt: skip
        yield ours


def mla_prefill_ties(op: MLAPrefill[Opaque], dtype: torch.dtype = torch.float32) -> None:
    """Two keys of a query score alike, 60 above all others: a score rounded to 16 bits decides."""
    dims, count_heads, start, count = WIDE, 3, 80, 24
    view, rows = paged([start + count], 16, dtype=dtype, dims=dims)
    row, heads = PrefillRow(start, count, rows.block_ids[0]), dims.weights(count_heads, dtype)
    cells = view.layout.cells(row.block_ids, 0, start)
    held = stored_rows(view, cells).double()
    inner, rope = held[:, : dims.latent], held[:, dims.latent :]
    keys = torch.cat((inner @ heads.key.double(), rope.expand(count_heads, -1, -1)), dim=-1)
    first = torch.arange(count)
    pairs = torch.stack((keys[:, first], keys[:, first + 40]), dim=2)  # [h, n, 2, nope + rope]
    scores = torch.full_like(pairs[..., :1], 60.3 / dims.scale)
    q = (torch.linalg.pinv(pairs) @ scores)[..., 0].transpose(0, 1).to(dtype)
    exact = attended.prefill(q, view, row, heads, dims.scale)
    for ours in _forms(op, q, view, row, heads, dims):
        what = "mla_prefill, two keys with like scores"
        within(what, ours, exact.out, exact.out_bound[..., None])
