"""The ops of latent attention over a cache in fp8: every storage, groups that end within the latent
and groups that hold it all, groups 2^12 apart in size, zeros of both signs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from trueline.cache.kinds.latent import PrefillSlice
from trueline.cache.layout import FP8_STORAGES, LatentFp8, LatentLayout
from trueline.cache.store import LatentStore
from trueline.ops.capabilities import Capabilities, Context, Opaque
from trueline.ops.latent_write import LatentWrite
from trueline.ops.latent_write import reference as exact_write
from trueline.ops.latent_write.stored import stored_rows
from trueline.ops.mla_decode import MLADecodeOp
from trueline.ops.mla_prefill import MLAPrefill, PrefillRow
from trueline.ops.sparse_mla import SparseMLA
from trueline.verify import sparse
from trueline.verify.bounds import norm_bound, rounding
from trueline.verify.ops import attended
from trueline.verify.ops.attention import FIXED, bits_of_rows, same_attention
from trueline.verify.ops.basic import ROTATION
from trueline.verify.ops.data import (
    SMALL,
    WIDE,
    Dims,
    H,
    L,
    R,
    close,
    decode_beside,
    group_amax,
    paged,
    randn,
    require,
    within,
)
from trueline.verify.ops.latent import written

BLOCK_SIZES = (1, 3, 64)
LENGTHS = [1, 2, 63, 64, 65, 130, 0]
PREFILLS = ((0, 1), (0, 40), (30, 25), (130, 3))
"""Positions before, and new ones."""
SPACING = 2.0**-3
"""From a code's number to the next, relative to it: one at the edge may round either way."""
FILL = 0xA5


def storages(declared: Capabilities, dtype: torch.dtype, latent: int = L) -> Iterator[LatentFp8]:
    """That are not refused: with some groups, of which the last is smaller; with one."""
    rope = str(dtype).removeprefix("torch.")
    for storage in FP8_STORAGES:
        for group, power_of_two in ((16, False), (16, True), (latent, False), (128, True)):
            fp8 = LatentFp8(storage, rope, group, power_of_two)
            layout = LatentLayout(latent, R, 1, fp8)
            if not declared.refusals(Context(dtype=dtype, latent=layout)):
                yield fp8


def latent_write(op: LatentWrite, dtype: torch.dtype = torch.float32) -> None:
    """Codes but for a few at the edge of a rounding, scales but for the last digits; no byte of
    another cell."""
    for fp8 in storages(op.capabilities, dtype):
        for n, block_size in ((1, 1), (9, 3)):
            writes(op, dtype, LatentLayout(L, R, block_size, fp8), n, H)


def writes(op: LatentWrite, dtype: torch.dtype, layout: LatentLayout, n: int, heads: int) -> None:
    assert layout.fp8 is not None
    wide, turned = layout.latent, layout.rope
    what = f"latent_write, {layout.fp8}, {n} tokens"
    sizes = [wide, turned, heads * turned, 3]
    whole = (randn(n, sum(sizes), seed=n) * 3).to(dtype)
    whole[:, :wide] *= in_groups(n, wide).to(dtype)
    whole[0, :wide:2] = -0.0
    before = whole.clone()
    cells = (torch.arange(n) * 7 + 2) % 40
    stores = [LatentStore(layout, 2, 48, dtype) for _ in range(2)]
    for store in stores:
        store.rows.fill_(FILL)
    latent, key, queries, _ = torch.split(whole, sizes, dim=1)
    given = partial(
        written, latent=latent, key=key, queries=queries.reshape(n, heads, turned), cells=cells,
        norm=(0.5 + randn(wide, seed=2).abs()).to(dtype), eps=1e-2 * n,
        angles=100 * randn(n, turned // 2, seed=3), pairing="interleaved",
    )  # fmt: skip
    given(op, stores[0].views[1])
    given(exact_write, stores[1].views[1])
    require(torch.equal(whole, before), f"{what}: writes its input")
    ours, wanted = (stored_rows(store.views[1], cells) for store in stores)
    # a code at the edge of a rounding, or the smallest step of its group
    steps = SPACING * wanted[:, :wide].abs() + 2.0**-9 * group_amax(
        wanted[:, :wide], layout.fp8.group
    )
    off = (ours[:, :wide] - wanted[:, :wide]).abs()
    require(bool((off <= steps * (1 + 2.0**-8)).all()), f"{what}: latents are not those given")
    digits = norm_bound(wide) + rounding(4, dtype)
    others = int((off > 2 * digits * wanted[:, :wide].abs()).sum())
    require(others <= 2 + off.numel() // 25, f"{what}: {others} codes of {off.numel()} are others")
    close(
        f"{what}: keys", ours[:, wide:], wanted[:, wide:], rounding(ROTATION) + rounding(4, dtype)
    )
    untouched = torch.ones(len(stores[0].rows[1]), dtype=torch.bool)
    untouched[cells] = False
    rows = stores[0].rows
    require(bool((rows[0] == FILL).all()), f"{what}: writes another layer")
    require(bool((rows[1][untouched] == FILL).all()), f"{what}: writes cells of others")


def in_groups(count: int, latent: int) -> Tensor:
    """[count, latent]: factors of runs of 16 channels, 2^12 apart, in another order each row."""
    run = torch.arange(latent) // 16
    return torch.exp2(-6.0 * ((run + torch.arange(count)[:, None]) % 3))


def mla_decode(op: MLADecodeOp, dtype: torch.dtype = torch.float32) -> None:
    """And the row of DeepSeek-V3.2's public cache."""
    for fp8 in storages(op.capabilities, dtype):
        for block_size in BLOCK_SIZES:
            decodes(op, dtype, fp8, block_size, SMALL, LENGTHS, H)
    public = LatentFp8("e4m3fn", str(dtype).removeprefix("torch."), 128)
    decodes(op, dtype, public, 64, WIDE, [65, 3], H)


def decodes(
    op: MLADecodeOp,
    dtype: torch.dtype,
    fp8: LatentFp8,
    block_size: int,
    dims: Dims,
    lengths: list[int],
    heads: int,
) -> None:
    layout = LatentLayout(*dims.cached, block_size, fp8)
    if op.capabilities.refusals(Context(dtype=dtype, latent=layout)):
        return
    view, rows = paged(lengths, block_size, dtype=dtype, dims=dims, fp8=fp8, factors=in_groups)
    q = randn(len(lengths), heads, dims.width, seed=9).to(dtype)
    exact = attended.decode(q, view, rows, dims.scale)
    prepared = op.prepare(rows, view, FIXED, heads)
    ours = op.run(q, view, prepared, softmax_scale=dims.scale)
    same_attention(f"mla_decode, {fp8}, {block_size=}", ours, exact, dtype)


def mla_decode_bits(op: MLADecodeOp) -> None:
    for fp8 in storages(op.capabilities, torch.float32):
        bits_of_rows(op, fp8)


def mla_prefill(op: MLAPrefill[Opaque], dtype: torch.dtype = torch.float32) -> None:
    for fp8 in storages(op.capabilities, dtype):
        for start, count in PREFILLS:
            prefills(op, dtype, fp8, start, count, SMALL, H)


def prefills(
    op: MLAPrefill[Opaque],
    dtype: torch.dtype,
    fp8: LatentFp8,
    start: int,
    count: int,
    dims: Dims,
    num_heads: int,
) -> None:
    heads = dims.weights(num_heads, dtype)
    view, rows = paged([start + count], 5, dtype=dtype, dims=dims, fp8=fp8, factors=in_groups)
    q = randn(count, num_heads, dims.nope + dims.rope, seed=7).to(dtype)
    row = PrefillRow(start, count, rows.block_ids[0])
    exact = attended.prefill(q, view, row, heads, dims.scale)
    for form in ("expanded", "absorbed"):
        part = PrefillSlice(slice(0, count), row)
        prepared = op.prepare([part], view, dims.heads(num_heads), decode_beside(), form)
        ours = q.new_full((count, num_heads, dims.value), torch.nan)
        op.run(
            q[..., : dims.nope], q[..., dims.nope :], view, prepared, heads, ours,
            softmax_scale=dims.scale,
        )  # fmt: skip
        what = f"mla_prefill, {form}, {fp8}, {start} + {count}"
        within(what, ours, exact.out, exact.out_bound[..., None])


def sparse_mla(op: SparseMLA[Opaque], dtype: torch.dtype = torch.float32) -> None:
    for fp8 in storages(op.capabilities, dtype):
        sparse.attend_lists(op, dtype, H, SMALL, fp8)
