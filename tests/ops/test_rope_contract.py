"""Rotation returns a new tensor and leaves its arguments alone, whatever they share; so an indexer
gives the same scores whichever implementation rotates its queries and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implementations import every, runnable
from trueline.cache.index import IndexStore
from trueline.cache.layout import IndexLayout
from trueline.ops.index_scores import reference as index_scores
from trueline.ops.registry import OPS
from trueline.ops.rope import reference
from trueline.ops.sparse_rows import Run, SparseRows
from trueline.verify.ops import randn
from trueline.verify.ops.rope_contract import (
    GATE,
    HEADS,
    PAIRINGS,
    ROTATED,
    TOKENS,
    WIDTH,
    angles,
    buffers,
)

BUFFERS = {how: (memory, q, k) for how, memory, q, k in buffers()}
all_of_them = pytest.mark.parametrize("module", OPS["rope"])


def rotate_first(op: Any, x: Tensor, pairing: Any) -> Tensor:
    """The first channels rotate, the others stay: what an indexer does with q and with k."""
    rotated = op.run(x[..., :ROTATED], *angles(), pairing)
    return torch.cat((rotated, x[..., ROTATED:]), dim=-1)


def test_the_buffers_are_what_they_say() -> None:
    for how, (memory, q, k) in BUFFERS.items():
        assert q.shape == (TOKENS, q.shape[1], WIDTH)
        assert k.shape == (TOKENS, 1, WIDTH)
        shared = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert shared == (not how.endswith("alone"))
        assert any(x.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
                   for x in (q, k))  # fmt: skip
    for how in ("k is a head of q", "overlapping"):  # one number is in both
        _, q, k = BUFFERS[how]
        before, kept = q.clone(), k.clone()
        k.fill_(7)
        assert not torch.equal(q, before)
        k.copy_(kept)
    assert HEADS > 1


@all_of_them
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("how", BUFFERS)
def test_arguments_stay_and_results_are_new(module: str, pairing: Any, how: str) -> None:
    op = runnable("rope", module)
    memory, q, k = BUFFERS[how]
    cos, sin = angles()
    before = [x.clone() for x in (memory, q, k, cos, sin)]
    alone = [op.run(x[..., :ROTATED].clone(), cos, sin, pairing) for x in (q, k)]
    made = [op.run(x[..., :ROTATED], cos, sin, pairing) for x in (q, k)]
    assert all(map(torch.equal, before, (memory, q, k, cos, sin)))
    for ours, wanted, x in zip(made, alone, (q, k), strict=True):
        assert torch.equal(ours, wanted)
        exact = reference.run(x[..., :ROTATED].double(), cos, sin, pairing)
        assert (ours - exact).abs().max() <= GATE * exact.abs().max()
        ours.fill_(torch.nan)
    assert all(map(torch.equal, before, (memory, q, k, cos, sin)))


@every("rope")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("how", BUFFERS)
def test_an_indexer_gives_the_same_scores(module: str, pairing: Any, how: str) -> None:
    """With shared memory and without, in either order, as with the reference's rotation."""
    op = runnable("rope", module)
    _, q, k = BUFFERS[how]
    weights = randn(TOKENS, q.shape[1], seed=8)

    def scores(rotate: Any, first: str, apart: bool) -> Tensor:
        given = {"q": q.clone() if apart else q, "k": k.clone() if apart else k}
        made = {name: rotate_first(rotate, given[name], pairing) for name in
                (("q", "k") if first == "q" else ("k", "q"))}  # fmt: skip
        view = IndexStore(IndexLayout(WIDTH, 4, "float32", "rows"), 1, 4).views[0]
        view.write(torch.arange(4, 4 + TOKENS), made["k"][:, 0])
        rows = SparseRows((Run([1, 2, 3], 1, TOKENS),))
        return index_scores.run(made["q"], weights, view, (rows, 0))

    wanted = scores(op, "q", True)
    for first in ("q", "k"):
        assert torch.equal(scores(op, first, False), wanted)
    exact = scores(reference, "q", True)
    seen = exact != -torch.inf
    # every product of a score is off by two rotations at most; its terms are as large as `size`
    rows, keys = (rotate_first(reference, x, pairing).double().norm(dim=-1) for x in (q, k))
    size = (weights.abs() * rows).sum(1, keepdim=True) * keys[:, 0]
    assert bool(((wanted - exact).abs() <= 2 * GATE * size)[seen].all())
