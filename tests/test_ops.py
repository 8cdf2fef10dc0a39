"""Every op against its float64 reference, on data that hides nothing: needles, prime-ish dims,
shuffled blocks, strided inputs, ragged and empty contexts, NaN in every byte that is not owned."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore
from trueline.ops import rope, steady
from trueline.ops.experts import cpu as experts
from trueline.ops.experts import reference as experts_reference
from trueline.ops.linear import onednn, torch_mm
from trueline.ops.linear import reference as linear_reference
from trueline.ops.mla_decode import DecodeRows, Tiling
from trueline.ops.mla_decode import cpu as decode
from trueline.ops.mla_decode import reference as decode_reference
from trueline.ops.mla_prefill import HeadWeights, PrefillRow, cheaper_form
from trueline.ops.mla_prefill import cpu as prefill
from trueline.ops.mla_prefill import reference as prefill_reference
from trueline.ops.registry import OPS
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.ops.rms_norm import reference as rms_norm_reference
from trueline.ops.rope import cpu as rotate
from trueline.ops.rope import reference as rotate_reference
from trueline.ops.route import cpu as route
from trueline.ops.route import reference as route_reference
from trueline.plan import bits_are_steady
from trueline.spec.feedforward import RouterSpec
from trueline.verify.ops import H, L, R, paged, randn

GATE = 3e-6
"""Largest relative error of a row, float32 to float64."""


def assert_rows_close(ours: Tensor, exact: Tensor, gate: float = GATE) -> None:
    """Per row, so that no large row hides a small one."""
    assert ours.shape == exact.shape
    assert ours.isfinite().all()
    error = (ours.double() - exact.double()).norm(dim=-1)
    scale = exact.double().norm(dim=-1).clamp_min(1e-30)
    worst = (error / scale).max()
    assert worst <= gate, f"row error {worst:.2e}"


def test_every_op_has_a_reference_and_is_tested_here() -> None:
    names = {path.name for path in (Path(rope.__file__).parent.parent).iterdir() if path.is_dir()}
    assert names - {"__pycache__"} == set(OPS)
    for op, implementations in OPS.items():
        assert implementations[-1] == "reference"
        for name in implementations:
            importlib.import_module(f"trueline.ops.{op}.{name}")


# -- linear ----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [onednn, torch_mm], ids=lambda m: m.__name__[-8:])
@pytest.mark.parametrize("shape", [(17, 13), (101, 67), (256, 384)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, 130])
def test_linear(implementation: Any, shape: tuple[int, int], rows: int) -> None:
    if implementation.refusals(torch.float32):
        pytest.skip(f"refused here: {implementation.refusals(torch.float32)}")
    weight, x = randn(*shape), randn(rows, shape[1] + 3, seed=1)[:, 1:-2]  # strided input
    before = x.clone()
    exact = linear_reference.run(x.double(), linear_reference.pack(weight))
    assert_rows_close(implementation.run(x, implementation.pack(weight)), exact)
    assert torch.equal(x, before)


@pytest.mark.parametrize("implementation", [onednn, torch_mm], ids=lambda m: m.__name__[-8:])
def test_linear_bits_do_not_depend_on_the_batch(implementation: Any) -> None:
    if implementation.refusals(torch.float32):
        pytest.skip(f"refused here: {implementation.refusals(torch.float32)}")
    assert bits_are_steady(implementation, torch.float32)


def test_the_probe_of_bits_can_fail() -> None:
    class Plain:
        pack = staticmethod(lambda weight: weight)
        run = staticmethod(lambda x, weight: torch.nn.functional.linear(x, weight) + len(x) * 1e-7)

    assert not bits_are_steady(Plain, torch.float32)


# -- norm and rope ---------------------------------------------------------------------


@pytest.mark.parametrize("width", [13, 37, 128])
def test_rms_norm(width: int) -> None:
    x = randn(9, width + 1)[:, 1:] * torch.tensor([1e-4, 1e-2, 1, 10, 1e3, 1, 1, 1, 1])[:, None]
    weight = 0.5 + randn(width, seed=2).abs()
    for eps in (1e-6, 1e-2):
        exact = rms_norm_reference.run(x.double(), weight.double(), eps)
        assert_rows_close(rms_norm.run(x, weight, eps), exact)


@pytest.mark.parametrize("pairing", ["pairs", "halves"])
def test_rope(pairing: Any) -> None:
    x = randn(7, 3, 14)[..., 2:12]  # strided
    angles = 100 * randn(7, 5, seed=3)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    before = x.clone()
    ours = rotate.run(x, cos, sin, pairing)
    exact = rotate_reference.run(x.double(), cos.double(), sin.double(), pairing)
    assert_rows_close(ours, exact)
    assert torch.equal(x, before)  # functional
    moved = {i for i in range(10) if not torch.equal(ours[..., i], x[..., i])}
    assert moved == set(range(10))  # every channel turns


# -- attention -------------------------------------------------------------------------

TILINGS = {"free": Tiling(1024, full=False), "small": Tiling(16, full=False),
           "fixed": Tiling(64, full=True)}  # fmt: skip


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_mla_decode(tiling: str, block_size: int) -> None:
    view, rows = paged([1, 2, 63, 64, 65, 130, 1, 300], block_size)
    q = randn(8, H, L + R, seed=9)
    exact, exact_lse = decode_reference.run(q.double(), view, rows, softmax_scale=0.21)
    prepared = decode.prepare(rows, view, TILINGS[tiling])
    out, lse = decode.run(q, view, prepared, softmax_scale=0.21)
    assert_rows_close(out, exact)
    assert (lse - exact_lse).abs().max() < 1e-5


def test_mla_decode_of_an_empty_row_is_zero_and_minus_infinity() -> None:
    view, rows = paged([5, 0, 9], 4)
    out, lse = decode.run(
        randn(3, H, L + R), view, decode.prepare(rows, view, TILINGS["free"]), softmax_scale=0.3
    )
    assert (out[1] == 0).all()
    assert (lse[1] == float("-inf")).all()
    assert lse[[0, 2]].isfinite().all()


def test_lse_is_natural() -> None:
    """Two keys with known scores: ln(e^a + e^b)."""
    layout = LatentLayout(2, 2, 1)
    store = LatentStore(layout, 1, 3, torch.float32)
    view = store.views[0]
    keys = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    view.write(torch.tensor([1, 2]), keys[:, :2], keys[:, 2:])
    rows = DecodeRows([2], [[1, 2]])
    q = torch.tensor([[[1.0, 1.0, 0, 0]]])
    _, lse = decode.run(q, view, decode.prepare(rows, view, TILINGS["free"]), softmax_scale=0.5)
    wanted = torch.tensor([0.5, 1.0]).logsumexp(0)
    assert lse.item() == pytest.approx(wanted.item(), abs=1e-6)


def test_decode_bits_depend_on_the_row_alone() -> None:
    lengths = [1, 64, 65, 200, 130, 7, 300, 2]
    view, rows = paged(lengths, 3)
    q = randn(8, H, L + R, seed=4)
    tiling = TILINGS["fixed"]
    whole, _ = decode.run(q, view, decode.prepare(rows, view, tiling), softmax_scale=0.2)
    for some in ([3], [0, 7], [6, 2, 4], [5, 6, 7, 0, 1, 2, 3, 4]):
        part = DecodeRows([lengths[i] for i in some], [rows.block_ids[i] for i in some])
        out, _ = decode.run(q[some], view, decode.prepare(part, view, tiling), softmax_scale=0.2)
        assert torch.equal(out, whole[some])


@pytest.mark.parametrize("cut", [1, 7, 64, 129])
def test_halves_merge_to_the_whole(cut: int) -> None:
    scores, values = 3 * randn(2, 6, 130), randn(2, 130, 11, seed=1)
    whole = decode.softmax_part(scores.clone(), values)
    parts = [
        decode.softmax_part(scores[..., s].clone(), values[:, s])
        for s in (slice(cut), slice(cut, None))
    ]
    out, lse = decode.merge(*parts)
    assert_rows_close(out, whole[0])
    assert torch.allclose(lse, whole[1], atol=1e-5)
    empty = decode.softmax_part(torch.full((2, 6, 4), float("-inf")), values[:, :4])
    for merged in (decode.merge(whole, empty), decode.merge(empty, whole)):
        assert torch.equal(merged[0], whole[0])
        assert torch.equal(merged[1], whole[1])


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 1), (0, 40), (17, 1), (30, 25), (600, 3), (1, 700), (2040, 20)]
)
@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_mla_prefill(form: Any, start: int, count: int, block_size: int) -> None:
    P, V = 13, 11
    view, rows = paged([start + count], block_size)
    heads = HeadWeights(randn(H, L, P, seed=5) / 6, randn(H, V, L, seed=6) / 6)
    q = randn(count, H, P + R, seed=7)
    row = PrefillRow(start, count, rows.block_ids[0])
    some = q if count < 100 else q[-50:]
    short = row if count < 100 else PrefillRow(start + count - 50, 50, row.block_ids)
    exact = prefill_reference.run(
        some.double(), view, short, heads, softmax_scale=0.21, form="expanded"
    )
    ours = prefill.run(q, view, row, heads, softmax_scale=0.21, form=form)
    assert_rows_close(ours[-len(exact) :], exact, 6e-6)  # needles make scores of 50 and more


def test_the_cheaper_form() -> None:
    heads = HeadWeights(torch.empty(16, 512, 128), torch.empty(16, 128, 512))
    assert cheaper_form(heads, 64, 2048, 2048) == "expanded"
    assert cheaper_form(heads, 64, 4, 2048) == "absorbed"


# -- experts ---------------------------------------------------------------------------

ROUTERS = {
    "v2 greedy": RouterSpec(scoring="softmax", correction_bias=False, num_groups=1, top_groups=1,
                            group_score=None, top_k=3, renormalise=False, scaling_factor=16.0),
    "v2 groups": RouterSpec(scoring="softmax", correction_bias=False, num_groups=4, top_groups=2,
                            group_score="max", top_k=3, renormalise=False, scaling_factor=1.0),
    "v3": RouterSpec(scoring="sigmoid", correction_bias=True, num_groups=4, top_groups=2,
                     group_score="top2_sum", top_k=3, renormalise=True, scaling_factor=2.5),
    "k2": RouterSpec(scoring="sigmoid", correction_bias=True, num_groups=1, top_groups=1,
                     group_score=None, top_k=5, renormalise=True, scaling_factor=2.827),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("kind", ["random", "negative bias", "underflow", "ties"])
def test_route(name: str, kind: str) -> None:
    router = ROUTERS[name]
    logits, bias = 2 * randn(40, 12), 0.3 * randn(12, seed=1)
    if kind == "negative bias":
        bias = bias - 5
    elif kind == "underflow":
        logits = logits - 200
    elif kind == "ties":
        logits, bias = torch.zeros(40, 12), torch.zeros(12)
    given = bias if router.correction_bias else None
    ids, weights = route.run(logits, given, router)
    exact_ids, exact_weights = route_reference.run(logits.double(), given, router)
    assert torch.equal(ids, exact_ids)
    assert torch.allclose(weights, exact_weights, rtol=1e-5, atol=1e-12)
    assert weights.isfinite().all()
    forced = (exact_ids + 1) % 12
    got, _ = route.run(logits, given, router, forced)
    assert torch.equal(got, forced)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("first", [0, 4])
def test_experts(tokens: int, first: int) -> None:
    E, K, D, W = 12, 3, 29, 17
    gate_up, down = randn(E, 2 * W, D) / 5, randn(E, D, W, seed=1) / 4
    x = randn(tokens, D, seed=2)
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(i))[:K]
                       for i in range(tokens)])  # fmt: skip
    weights = randn(tokens, K, seed=3).abs() * 2.5
    held = slice(first, first + 8)
    exact = experts_reference.run(
        x.double(), ids, weights.double(),
        experts_reference.pack(gate_up[held], down[held], None), None, first,
    )  # fmt: skip
    packed = experts.pack(gate_up[held], down[held], torch_mm)
    ours = experts.run(x, ids, weights, packed, torch_mm, first)
    zero = exact.norm(dim=-1) == 0  # tokens whose experts are all elsewhere
    assert (ours[zero] == 0).all()
    assert_rows_close(ours[~zero], exact[~zero], 5e-6)


def test_each_expert_is_read_once() -> None:
    calls: list[int] = []

    class Counting:
        pack = staticmethod(lambda weight: weight)

        @staticmethod
        def run(x: Tensor, weight: Tensor) -> Tensor:
            calls.append(id(weight))
            return x @ weight.T

    packed = experts.pack(randn(6, 8, 5), randn(6, 5, 4), Counting)
    ids = torch.tensor([[0, 3], [3, 0], [0, 5], [3, 5]])
    experts.run(randn(4, 5), ids, torch.ones(4, 2), packed, Counting)
    assert len(calls) == len(set(calls)) == 6  # three active experts, two products each


# -- steady elementwise functions -------------------------------------------------------


@pytest.mark.parametrize("function", [steady.sigmoid, steady.silu, steady.exp])
@pytest.mark.parametrize("width", [1, 5, 12, 64, 384])
def test_elementwise_bits_do_not_depend_on_neighbours(function: Any, width: int) -> None:
    x = randn(700, width)
    whole = function(x)
    for part in (slice(0, 1), slice(3, 5), slice(7, 40), slice(13, 699)):
        assert torch.equal(function(x[part]), whole[part])
