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
from trueline.choices import bits_are_steady
from trueline.ops import rope, steady
from trueline.ops.experts import cpu as experts_cpu
from trueline.ops.experts import reference as experts_reference
from trueline.ops.head_product import reference as head_product_reference
from trueline.ops.linear import reference as linear_reference
from trueline.ops.linear import torch_mm
from trueline.ops.mla_decode import DecodeRows, Tiling
from trueline.ops.mla_decode import cpu as decode_cpu
from trueline.ops.mla_decode import reference as decode_reference
from trueline.ops.mla_prefill import HeadWeights, PrefillRow, cheaper_form
from trueline.ops.mla_prefill import cpu as prefill
from trueline.ops.mla_prefill import reference as prefill_reference
from trueline.ops.mlp import reference as mlp_reference
from trueline.ops.registry import OPS, implementation
from trueline.ops.rms_norm import reference as rms_norm_reference
from trueline.ops.rope import reference as rotate_reference
from trueline.ops.route import reference as route_reference
from trueline.spec.feedforward import RouterSpec
from trueline.verify.ops import H, L, R, paged, randn

GATE = 3e-6
"""Largest relative error of a row, float32 to float64."""


def every(op: str) -> Any:
    """A test runs for every implementation but the reference, as `module`."""
    return pytest.mark.parametrize("module", [each for each in OPS[op] if each != "reference"])


def runnable(op: str, name: str) -> Any:
    module = implementation(op, name)
    refused = module.refusals(torch.float32, False) if hasattr(module, "refusals") else []
    if refused:
        pytest.skip(f"refused here: {refused}")
    return module


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


@every("linear")
@pytest.mark.parametrize("shape", [(17, 13), (101, 67), (256, 384)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, 130])
def test_linear(module: str, shape: tuple[int, int], rows: int) -> None:
    linear = runnable("linear", module)
    weight, x = randn(*shape), randn(rows, shape[1] + 3, seed=1)[:, 1:-2]  # strided input
    before = x.clone()
    exact = linear_reference.run(x.double(), linear_reference.pack(weight))
    for strided in (x, x.T.contiguous().T):
        assert_rows_close(linear.run(strided, linear.pack(weight)), exact)
    assert torch.equal(x, before)


@every("linear")
def test_linear_bits_do_not_depend_on_the_batch(module: str) -> None:
    assert bits_are_steady(runnable("linear", module), torch.float32)


@every("head_product")
@pytest.mark.parametrize("steady", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_head_product(module: str, steady: bool, rows: int) -> None:
    op = runnable("head_product", module)
    weight, x = randn(5, 37, 19), randn(rows, 5, 23, seed=1)[..., 2:-2]  # strided input
    exact = head_product_reference.run(
        x.double(), head_product_reference.pack(weight, torch_mm, steady)
    )
    packed = op.pack(weight, torch_mm, steady)
    ours = op.run(x, packed)
    for strided in (x, x.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        assert_rows_close(op.run(strided, packed), exact)
    if steady:
        assert torch.equal(op.run(x[:1], packed), ours[:1])


@every("mlp")
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_mlp(module: str, rows: int) -> None:
    op = runnable("mlp", module)
    D, W = 29, 43
    gate_up, down = randn(2 * W, D), randn(D, W, seed=1)
    x = 40 * randn(rows, D + 2, seed=2)[:, 1:-1]  # strided, and far into both ends of silu
    exact = mlp_reference.run(x.double(), mlp_reference.pack(gate_up, down, None), None)
    packed = op.pack(gate_up, down, torch_mm)
    ours = op.run(x, packed, torch_mm)
    assert_rows_close(ours, exact)
    assert torch.equal(op.run(x[:1], packed, torch_mm), ours[:1])


def test_the_probe_of_bits_can_fail() -> None:
    class Plain:
        pack = staticmethod(lambda weight: weight)
        run = staticmethod(lambda x, weight: torch.nn.functional.linear(x, weight) + len(x) * 1e-7)

    assert not bits_are_steady(Plain, torch.float32)


# -- norm and rope ---------------------------------------------------------------------


@every("rms_norm")
@pytest.mark.parametrize("width", [13, 37, 128])
def test_rms_norm(module: str, width: int) -> None:
    rms_norm = runnable("rms_norm", module)
    x = randn(9, width + 1)[:, 1:] * torch.tensor([1e-4, 1e-2, 1, 10, 1e3, 1, 1, 1, 1])[:, None]
    weight = 0.5 + randn(width, seed=2).abs()
    for eps in (1e-6, 1e-2):
        exact = rms_norm_reference.run(x.double(), weight.double(), eps)
        for strided in (x, x.T.contiguous().T):
            assert_rows_close(rms_norm.run(strided, weight, eps), exact)


@every("rope")
@pytest.mark.parametrize("pairing", ["pairs", "halves"])
def test_rope(module: str, pairing: Any) -> None:
    rotate = runnable("rope", module)
    x = randn(14, 3, 7).permute(2, 1, 0)[..., 2:12]  # strided
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


@every("mla_decode")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads", [H, 1, 8, 19])
def test_mla_decode(module: str, tiling: str, block_size: int, heads: int) -> None:
    decode = runnable("mla_decode", module)
    view, rows = paged([1, 2, 63, 64, 65, 130, 1, 300], block_size)
    q = randn(8, heads, L + R, seed=9)
    exact, exact_lse = decode_reference.run(q.double(), view, rows, softmax_scale=0.21)
    prepared = decode.prepare(rows, view, TILINGS[tiling])
    out, lse = decode.run(q, view, prepared, softmax_scale=0.21)
    assert_rows_close(out, exact)
    assert (lse - exact_lse).abs().max() < 1e-5


@every("mla_decode")
def test_mla_decode_of_an_empty_row_is_zero_and_minus_infinity(module: str) -> None:
    decode = runnable("mla_decode", module)
    view, rows = paged([5, 0, 9], 4)
    out, lse = decode.run(
        randn(3, H, L + R), view, decode.prepare(rows, view, TILINGS["free"]), softmax_scale=0.3
    )
    assert (out[1] == 0).all()
    assert (lse[1] == float("-inf")).all()
    assert lse[[0, 2]].isfinite().all()


@every("mla_decode")
def test_lse_is_natural(module: str) -> None:
    """Two keys with known scores: ln(e^a + e^b)."""
    decode = runnable("mla_decode", module)
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


@every("mla_decode")
def test_decode_bits_depend_on_the_row_alone(module: str) -> None:
    decode = runnable("mla_decode", module)
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
    whole = decode_cpu.softmax_part(scores.clone(), values)
    parts = [
        decode_cpu.softmax_part(scores[..., s].clone(), values[:, s])
        for s in (slice(cut), slice(cut, None))
    ]
    out, lse = decode_cpu.merge(*parts)
    assert_rows_close(out, whole[0])
    assert torch.allclose(lse, whole[1], atol=1e-5)
    empty = decode_cpu.softmax_part(torch.full((2, 6, 4), float("-inf")), values[:, :4])
    for merged in (decode_cpu.merge(whole, empty), decode_cpu.merge(empty, whole)):
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


@every("route")
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("kind", ["random", "negative bias", "underflow", "ties"])
def test_route(module: str, name: str, kind: str) -> None:
    route = runnable("route", module)
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


@every("experts")
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("first", [0, 4])
def test_experts(module: str, tokens: int, first: int) -> None:
    experts = runnable("experts", module)
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

    packed = experts_cpu.pack(randn(6, 8, 5), randn(6, 5, 4), Counting)
    ids = torch.tensor([[0, 3], [3, 0], [0, 5], [3, 5]])
    experts_cpu.run(randn(4, 5), ids, torch.ones(4, 2), packed, Counting)
    assert len(calls) == len(set(calls)) == 6  # three active experts, two products each


# -- steady elementwise functions -------------------------------------------------------


@pytest.mark.parametrize("function", [steady.sigmoid, steady.silu, steady.exp])
@pytest.mark.parametrize("width", [1, 5, 12, 64, 384])
def test_elementwise_bits_do_not_depend_on_neighbours(function: Any, width: int) -> None:
    x = randn(700, width)
    whole = function(x)
    for part in (slice(0, 1), slice(3, 5), slice(7, 40), slice(13, 699)):
        assert torch.equal(function(x[part]), whole[part])
