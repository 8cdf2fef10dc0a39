"""What kernels for fp8 activations do around the tensor cores of a Hopper GPU, line by line on this
CPU; and how those are launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trueline.ops import codes as coded
from trueline.ops.codes import codes_of
from trueline.ops.experts import hopper_fp8 as experts
from trueline.ops.experts import triton_quantised
from trueline.ops.fp8_launch import (
    MOST_FEW,
    ROW_TILES,
    TILE,
    Placed,
    combine,
    few_launch,
    fits,
    gemm_launch,
    through_fp8,
)
from trueline.ops.linear import hopper_fp8 as linear
from trueline.ops.mlp import hopper_fp8 as mlp
from trueline.reference import functional
from trueline.verify.ops import FP8_CHECKS
from trueline.verify.ops.data import randn
from trueline.verify.ops.fp8_inputs import inputs, weight
from trueline.weights.value import Weight

SMS = 132


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_through_fp8_is_the_definition(powers_of_two: bool) -> None:
    """Bit by bit in float32, whatever group, tie or floor."""
    for channels in (1, 127, 128, 129, 300, 2049):
        for given in inputs(9, channels, torch.float32):
            exact = functional.through_fp8(given.x, powers_of_two)
            assert torch.equal(through_fp8(given.x, powers=powers_of_two), exact)


@pytest.mark.parametrize("op", ["linear", "mlp", "experts"])
def test_blocks_that_the_gemm_does_not_take(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable kernels multiply; the others need tensor cores."""
    monkeypatch.setattr("trueline.ops.fp8_launch.KNOWN_MULTIPLE", 1 << 20)
    for name, value in {
        "fp8_linear": lambda: linear,
        "SIZES": ((300, 170),),
        "MATRICES": ((130, 300),),
        **dict.fromkeys(("ROWS", "MLP_ROWS", "TOKENS"), (1, 17)),
    }.items():
        monkeypatch.setattr(f"trueline.verify.ops.fp8_inputs.{name}", value)
    module = {"linear": linear, "mlp": mlp, "experts": experts}[op]
    FP8_CHECKS[op][0].run(module)


STREAMED = experts.StreamLaunch(experts.Streamed(32, 512, 4), experts.Streamed(64, 256, 4))
ACROSS_PAIRS = experts.StreamLaunch(experts.Streamed(64, 512, 4), experts.Streamed(16, 512, 4))


@pytest.mark.parametrize("how", [None, STREAMED, ACROSS_PAIRS])
def test_experts_streamed(
    how: experts.StreamLaunch | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handful of tokens, tiles as launched and others, against the definition."""
    monkeypatch.setattr("trueline.verify.ops.fp8_inputs.fp8_linear", lambda: linear)
    monkeypatch.setattr("trueline.verify.ops.fp8_inputs.SIZES", ((384, 384),))
    monkeypatch.setattr("trueline.verify.ops.fp8_inputs.TOKENS", (1, 3) if how is None else (2,))
    monkeypatch.setattr(experts, "run_grouped", None)  # needs tensor cores
    if how is not None:
        monkeypatch.setattr(experts, "stream_launch", lambda *_: how)
    FP8_CHECKS["experts"][0].run(experts)


def test_shared_experts_streamed() -> None:
    """What they give is added with weight 1; of routed experts elsewhere, nothing is."""
    (gate_up, down), x = (weight(5, *s, seed=1, powers_of_two=False) for s in SHAPES), randn(2, 256)
    ids, weights = torch.tensor([[3, 9, 1], [1, 2, 0]]), randn(2, 3, seed=2).abs()
    own = triton_quantised.pack(gate_up, down, linear)
    every = torch.cat((ids, torch.tensor([[4, 5]] * 2)), 1)
    shares = torch.cat((weights, torch.ones(2, 2)), 1)
    ours = experts.run(x, ids, weights, _with_shared(own, 2), linear, first=1)
    routed = experts.run(x, every, shares, _with_shared(own, 0), linear, first=1)
    assert torch.equal(ours, routed)
    fewer = experts.run(x, ids, weights, _with_shared(own, 1), linear, first=1)
    assert not torch.equal(ours, fewer)


def _with_shared(packed: triton_quantised.Packed, count: int) -> experts.Packed:
    return experts.of_codes(replace(packed, shared=count))


def test_which_tokens_are_streamed() -> None:
    """One and two of the published models; tiles divide blocks, and fit registers."""
    for top, shared, hidden, width in ((6, 2, 2048, 1408), (8, 1, 7168, 2048), (8, 0, 4096, 512)):
        for tokens in (1, 2):
            how = experts.stream_launch(tokens, top, shared, hidden, width)
            assert how is not None
            assert how.first.inner >= hidden
            for each, codes in (
                (how.first, 2 * how.first.inner),
                (how.second, -(-(top + shared) * width // how.second.inner) * how.second.inner),
            ):
                assert TILE % each.columns == 0
                assert each.columns * codes <= 32 * each.warps * experts.THREAD_CODES
                assert each.inner % experts.WARP_CODES == 0
        assert experts.stream_launch(3, top, shared, hidden, width) is None
    assert experts.stream_launch(1, 18, 0, 2048, 8192) is None
    assert experts.stream_launch(1, 2, 0, 1 << 17, 2048) is None


def rows_of(matrix: Weight, first: int, count: int) -> Weight:
    from trueline.spec.source import Span

    return matrix.cut(0, Span(first, first + count, matrix.shape[0]))


def test_which_blocks_fit() -> None:
    whole = weight(256, 384, seed=1, powers_of_two=False)
    assert fits(codes_of(whole))
    assert fits(codes_of(rows_of(whole, 128, 100)))  # partial at the end
    assert not fits(codes_of(rows_of(whole, 64, 128)))  # scales for 64 rows
    assert not fits(codes_of(weight(256, 392, seed=1, powers_of_two=False)))  # not for TMA
    assert not fits(codes_of(weight(2, 200, 384, seed=1, powers_of_two=False)))
    assert fits(codes_of(weight(2, 256, 384, seed=1, powers_of_two=False)))
    smaller = replace(codes_of(whole), group=64)
    assert not fits(smaller)


@pytest.mark.parametrize("width", [256, 200, 64])
def test_gate_and_up_in_whole_blocks(width: int) -> None:
    """Each row keeps its number and scale; added ones are zero."""
    gate, up = (weight(width, 384, seed=seed, powers_of_two=True) for seed in (1, 2))
    packed = mlp.stacked([codes_of(gate), codes_of(up)])
    assert packed is not None
    whole = -(-width // TILE) * TILE
    numbers = packed.numbers[0].view(torch.float8_e4m3fn).float()
    scales = packed.scales[0].repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    values = (numbers * scales).view(2, whole, 384)
    for half, exact in zip(values, (gate, up), strict=True):
        assert torch.equal(half[:width], exact.dequantise(torch.float32))
        assert not half[width:].any()


@pytest.mark.parametrize(("first", "shared"), [(0, 0), (2, 0), (2, 2), (0, 1)])
def test_pairs_are_placed(first: int, shared: int) -> None:
    """Each in a row of a tile of its expert; the sum over them has their weights."""
    tokens, held, top = 37, 5, 3
    ids = randn(tokens, held + 2 * first, seed=1).argsort(1)[:, :top].to(torch.int32)
    weights = randn(tokens, top, seed=2)
    placed = experts.place(ids, held + shared, shared, first)
    rows = randn(len(placed.order), 48, seed=3)
    total = torch.zeros(tokens, 48)
    for pair in range(placed.pairs):
        token, choice = divmod(pair, top + shared)
        expert = int(ids[token, choice]) - first if choice < top else held + choice - top
        if not 0 <= expert < held + shared or (choice < top and expert >= held):
            continue
        place = int(placed.places[pair])
        assert int(placed.order[place]) == pair
        assert int(placed.tiles[place // TILE]) == expert
        total[token] += rows[place] * (weights[token, choice] if choice < top else 1.0)
    out = torch.empty(tokens, 48)
    combine(rows, weights, placed, out, 32)
    assert torch.allclose(out, total, rtol=0, atol=1e-5)
    _whole_tiles(placed)


def _whole_tiles(placed: Placed) -> None:
    """Rows without a pair follow those that have one."""
    tiles = placed.order[: int(placed.total) * TILE].view(-1, TILE)
    empty = tiles >= placed.pairs
    assert torch.equal(empty, empty.int().cummax(1).values.bool())
    assert not empty[:, 0].any()


def test_shared_experts_stand_behind_the_routed() -> None:
    gate_up, down = (weight(3, *shape, seed=1, powers_of_two=True) for shape in SHAPES)
    more = weight(2 * 2 * 128, 256, seed=5, powers_of_two=True)
    more_down = weight(256, 2 * 128, seed=6, powers_of_two=True)
    packed = triton_quantised.pack_with_shared(gate_up, down, more, more_down, linear)
    assert packed.shared == 2
    both, last = _numbers(packed.gate_up), _numbers(packed.down)
    assert torch.equal(both[:3], gate_up.dequantise(torch.float32))
    wide, tall = more.dequantise(torch.float32), more_down.dequantise(torch.float32)
    for i in range(2):
        mine = slice(128 * i, 128 * (i + 1))
        assert torch.equal(both[3 + i], torch.cat((wide[:256][mine], wide[256:][mine])))
        assert torch.equal(last[3 + i], tall[:, mine])


SHAPES = ((256, 256), (256, 128))


def _numbers(codes: coded.Codes) -> Tensor:
    scales = codes.scales.repeat_interleave(codes.rows_per_scale, 1)
    scales = scales.repeat_interleave(codes.group, 2)
    return codes.numbers.view(torch.float8_e4m3fn).float() * scales


def test_every_part_of_the_depth_has_work() -> None:
    for rows in (*range(1, MOST_FEW + 2), 1000):
        for width in (64, 128, 2240, 24576):
            for depth in (16, 128, 1000, 7168, 16384):
                how = few_launch(rows, width, depth, SMS)
                row_tiles = -(-rows // how.rows)
                assert how.parts == 1 or row_tiles <= ROW_TILES
                assert 1 <= how.parts <= -(-depth // TILE)
                assert how.rows in (8, 16, 32, 64)


def test_no_tile_without_rows_holds_up_others() -> None:
    """Programs take tiles in turn: row tiles that are not there may be few."""
    for rows in range(1, 9000, 37):
        tiles = -(-rows // TILE)
        how = gemm_launch(rows, 7168, grouped=False, gated=False, sms=SMS)
        filled = -(-tiles // how.group) * how.group
        assert filled <= tiles * 1.125
