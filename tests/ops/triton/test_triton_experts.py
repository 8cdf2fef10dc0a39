"""Routed experts on a GPU, line by line on this CPU: every way to launch them, against the float64
reference; and the GEMMs around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spread import diagonal
from trueline.layers.decoder import Decoder
from trueline.ops.experts import reference, triton
from trueline.ops.experts.triton import ExpertsLaunch, GemmTiles
from trueline.ops.linear import cublas
from trueline.ops.registry import OPS, capabilities, implementation
from trueline.verify import bounds
from trueline.verify.failed import CheckFailed
from trueline.verify.ops import OP_CHECKS, randn
from trueline.verify.ops.basic import experts_bound
from trueline.verify.ops.data import within

DTYPES = [torch.float32, torch.float16]
FEW = ExpertsLaunch("few", GemmTiles(4, 0), GemmTiles(8, 16))
AT_ONCE = ExpertsLaunch("few", GemmTiles(1, 0), GemmTiles(2, 0))
SORTED = ExpertsLaunch("sorted", GemmTiles(64, 32, swap=False), GemmTiles(32, 32, group=3))
HALVED = ExpertsLaunch(
    "sorted",
    GemmTiles(32, 32, rows=32, swap=False, halve=True, group=2),
    GemmTiles(32, 16, rows=32, halve=True),
)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has written is NaN, or a place far away."""
    empty = torch.Tensor.new_empty

    def poisoned(self: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = empty(self, *shape, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize(
    ("which", "dtype"),
    diagonal(
        [
            (op, name)
            for op in ("linear", "batched_gemm", "mlp", "experts")
            for name in OPS[op]
            if "cuda" in capabilities(op, name).devices and capabilities(op, name).formats is None
        ],
        reversed(DTYPES),
    ),
)
def test_op(which: tuple[str, str], dtype: torch.dtype) -> None:
    op, name = which
    for check in OP_CHECKS[op]:
        if not check.invariant and not check.stored:
            check.run(implementation(op, name), dtype)


def test_rounded_sums_are_seen() -> None:
    """`run_wide` must have the digits of float32."""

    def rounded_first(x: Tensor, packed: Tensor) -> Tensor:
        return cublas.run(x, packed).float()

    broken = SimpleNamespace(pack=cublas.pack, run=cublas.run, run_wide=rounded_first)
    with pytest.raises(CheckFailed, match="float32: a row is off"):
        OP_CHECKS["linear"][0].run(broken, torch.float16)


def test_logits_keep_their_digits() -> None:
    """Those of a large vocabulary are often equal once they are rounded."""
    norm = SimpleNamespace(run=lambda x, weight, eps: x)
    hidden, head = randn(3, 64).bfloat16(), randn(40, 64, seed=1).bfloat16()
    decoder: Any = SimpleNamespace(
        ops=SimpleNamespace(linear=cublas, rms_norm=norm),
        head=cublas.pack(head),
        norm=None,
        spec=SimpleNamespace(norm_eps=0.0),
        _holds_all_words=lambda: True,
    )
    exact, off = hidden.double() @ head.double().T, bounds.gemm(hidden, head, torch.float32)
    within("linear, logits", Decoder.logits(decoder, hidden), exact, off)


@pytest.mark.parametrize(("how", "dtype"), diagonal([FEW, AT_ONCE, SORTED, HALVED], DTYPES))
def test_every_way(how: ExpertsLaunch, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of this rank only, two shared ones, more pairs of one expert than a tile has rows,
    others with none, a limit that many reach, and a sort in several segments."""
    limit = 0.8
    monkeypatch.setattr(triton, "SHORT", 16)
    monkeypatch.setattr(triton, "SEGMENT", 32)
    n, experts, top, hidden, width, first = 3 if how.way == "few" else 21, 6, 3, 37, 19, 2
    gate_up = (randn(experts, 2 * width, hidden) / 4).to(dtype)
    down = (randn(experts, hidden, width, seed=1) / 4).to(dtype)
    shared = (
        (randn(4 * width, hidden, seed=5) / 4).to(dtype),
        (randn(hidden, 2 * width, seed=6) / 4).to(dtype),
    )
    x, weights = randn(n, hidden + 2, seed=2).to(dtype)[:, 1:-1], randn(n, top, seed=3).abs()
    ids = 1 + randn(n, experts, seed=4).argsort(1)[:, :top]
    ids[:, 0], ids[0, 1], ids[1, 2] = 5, 1, 9
    # The shared experts as the reference would have them: every token's, with weight 1.
    everyone = torch.arange(8, 10).expand(n, 2)
    packed = triton.pack_with_shared(gate_up, down, *shared, None, limit)
    every = torch.cat((ids.where(ids < 8, -1), everyone), 1)
    factors = torch.cat((weights, torch.ones(n, 2)), 1)
    exact = reference.run(
        x.double(),
        every,
        factors,
        reference.pack(packed.gate_up, packed.down, None, limit),
        None,
        first,
    )
    ours = triton.run_with(how, x, ids, weights, packed, first)
    # the shared experts are the last of those packed
    off = experts_bound(x, every - first, factors, packed.gate_up, packed.down, limit=limit)
    within(f"experts, {how.way}", ours, exact, off + bounds.stored(exact, dtype))


def test_the_sort() -> None:
    """Every pair once, in its expert's tiles; the rest of a tile is marked."""
    step: Any = triton._Step(
        torch.empty(40, 8),
        randn(40, 12, seed=4).argsort(1)[:, :3].contiguous(),
        torch.empty(40, 3),
        triton.Packed(torch.empty(7, 4, 8), torch.empty(7, 8, 2), 1),
        first=3,
    )
    order, tiles, total = step._sorted(16)
    seen = []
    for tile, expert in zip(order.view(-1, 16)[: int(total)], tiles, strict=False):
        for pair in tile[tile < 160].tolist():
            slot = pair % 4
            assert int(expert) == (6 if slot == 3 else int(step.ids[pair // 4, slot]) - 3)
            seen.append(pair)
        assert (tile[tile >= 160] == 160).all()
    here = [p for p in range(160) if p % 4 == 3 or 3 <= int(step.ids[p // 4, p % 4]) < 9]
    assert sorted(seen) == here


def test_launch_follows_the_batch() -> None:
    """A tile for nearly every expert; a handful of pairs is not sorted."""

    def cut(tokens: int) -> tuple[str, int]:
        how = triton.launch(tokens, 6, 2, 64, 2048, 1408, torch.bfloat16)
        assert how.first.rows == how.second.rows
        return how.way, how.first.rows

    assert [cut(n) for n in (1, 16, 64, 256, 4096)] == [
        ("few", 16), ("sorted", 16), ("sorted", 16), ("sorted", 32), ("sorted", 128),
    ]  # fmt: skip
