"""Attention ops against their float64 references, on data that hides nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.mla_decode import DecodeRows, Tiling
from trueline.ops.mla_decode import reference as decode_reference
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import cpu as prefill
from trueline.ops.mla_prefill import reference as prefill_reference
from trueline.ops.registry import implementation, runnable
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed

L, R, H, P, V = 37, 10, 5, 13, 11
GATE = 6e-6
"""Largest relative error of a row, float32 to float64; needles make scores of 50 and more."""
LSE_GATE = 2e-5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(lengths: list[int], block_size: int, seed: int = 0) -> tuple[LatentView, DecodeRows]:
    """A cache with shuffled blocks and a needle in every row; every byte not owned is NaN."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 8
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))
    ids = (order + 1).tolist()
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    layout = LatentLayout(L, R, block_size)
    store = LatentStore(layout, 1, num_blocks, torch.float32)
    store.poison(range(num_blocks))
    view = store.views[0]
    for row, length in enumerate(lengths):
        if length:
            numbers = randn(length, L + R, seed=seed + row + 1)
            numbers[length // 2] *= 12
            cells = torch.tensor(layout.cells(blocks[row], 0, length))
            view.write(cells, numbers[:, :L], numbers[:, L:])
    return view, DecodeRows(lengths, blocks)


def attention(subject: Subject) -> None:
    """Decode and prefill, in every form and tiling, with ragged, empty and long contexts."""
    view, rows = paged([1, 2, 63, 64, 65, 130, 0, 300], 3)
    q = randn(8, H, L + R, seed=9)
    exact, exact_lse = decode_reference.run(q.double(), view, rows, softmax_scale=0.21)
    for name in runnable("mla_decode", torch.float32):
        decode = implementation("mla_decode", name)
        for tiling in (Tiling(1024, full=False), Tiling(16, full=False), Tiling(64, full=True)):
            what = f"mla_decode, {name}, tiles of {tiling.size}"
            prepared = decode.prepare(rows, view, tiling)
            out, lse = decode.run(q, view, prepared, softmax_scale=0.21)
            _close(what, out, exact)
            same = (lse == exact_lse) | ((lse - exact_lse).abs() <= LSE_GATE)
            if not bool(same.all()):
                raise CheckFailed(f"op = reference: {what}: lse differs")
    heads = HeadWeights(randn(H, L, P, seed=5) / 6, randn(H, V, L, seed=6) / 6)
    for start, count in ((0, 1), (0, 40), (17, 1), (30, 25), (2030, 30)):
        view, rows = paged([start + count], 5)
        q = randn(count, H, P + R, seed=7)
        row = PrefillRow(start, count, rows.block_ids[0])
        wanted = prefill_reference.run(
            q.double(), view, row, heads, softmax_scale=0.21, form="expanded"
        )
        for form in ("expanded", "absorbed"):
            ours = prefill.run(q, view, row, heads, softmax_scale=0.21, form=form)
            _close(f"mla_prefill, {form}, {start} + {count}", ours, wanted)


def _close(what: str, ours: Tensor, exact: Tensor) -> None:
    error = (ours.double() - exact.double()).norm(dim=-1)
    scale = exact.double().norm(dim=-1).clamp_min(1e-30)
    worst = float((error / scale).max())
    if not worst <= GATE:  # also when NaN
        raise CheckFailed(f"op = reference: {what}: a row is off by {worst:.2g}, accepted {GATE:g}")
