"""Numerics `activations`: products whose inputs go through fp8, against the definition in float64.

An input that is within rounding errors of the middle between two codes may be either of them, and
a group whose largest number is as near to a power of two times 448 may have either scale: a row is
accepted within all that such inputs may change. Where scales are powers of two because the
largest number says so, nothing is rounded before the code: there only one code is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from trueline.ops.capabilities import Opaque
from trueline.ops.experts import InvariantExperts
from trueline.ops.linear import LinearOp
from trueline.ops.mlp import InvariantMLP
from trueline.ops.registry import OPS, capabilities, implementation
from trueline.reference.functional import FLOOR, GROUP, LARGEST, through_fp8
from trueline.spec.source import Span
from trueline.verify import bounds
from trueline.verify.ops.data import randn, require, within
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.value import StoredPart, Weight

BLOCK = (128, 128)
ACTIVATIONS = "activations"
HIDDEN, WIDTH, EXPERTS, CHOSEN = 300, 170, 6, 3
"""Three groups and two, the last ones partial."""
SIZES = ((HIDDEN, WIDTH), (384, 256))
"""Also whole ones, which GEMMs of fp8 need."""
MATRICES = ((40, 60), (130, 300), (256, 384), (200, 400))
ROWS, MLP_ROWS, TOKENS = (1, 5, 33, 200), (1, 9, 150), (1, 11, 500)
LIMIT = 20.0
"""That half of these gates and ups are beyond."""


def fp8_linear() -> LinearOp:
    """For ops that are given a linear, on the default device."""
    device = torch.get_default_device().type
    found = (name for name in OPS["linear"] if _quantises_inputs(name, device))
    return implementation("linear", next(found))


def _quantises_inputs(name: str, device: str) -> bool:
    declared = capabilities("linear", name)
    return ACTIVATIONS in declared.numerics and device in declared.devices


# -- data ------------------------------------------------------------------------------


def weight(*shape: int, seed: int, powers_of_two: bool) -> Weight:
    """A matrix in block fp8, or a stack of them; numbers keep the size of what they multiply."""
    matrices = math.prod(shape[:-2])
    parts = tuple(
        StoredPart(
            _stored(shape[-2], shape[-1], 100 * seed + i, powers_of_two),
            BlockFp8.label,
            (i, 0, 0) if len(shape) == 3 else (0, 0),
        )
        for i in range(matrices)
    )
    device = torch.get_default_device()
    return Weight(shape, torch.float32, parts, device, device)


def _stored(rows: int, columns: int, seed: int, powers_of_two: bool) -> Fp8Stored:
    codes = (100 * randn(rows, columns, seed=seed)).clamp(-LARGEST, LARGEST)
    grid = [-(-size // block) for size, block in zip((rows, columns), BLOCK, strict=True)]
    scales = torch.exp2(randn(*grid, seed=seed + 1).clamp(-2, 2)) / (100 * math.sqrt(columns))
    if powers_of_two:
        scales = scales.log2().round().exp2()
    return Fp8Stored(codes.to(torch.float8_e4m3fn), scales, BLOCK, powers_of_two=powers_of_two)


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    exact: bool = False
    """Whether codes are exact quotients, ties among them."""


def inputs(rows: int, channels: int, dtype: torch.dtype) -> list[Inputs]:
    """Strided. Groups of sizes far apart, a needle, zeros, numbers at the floor; then rows whose
    largest numbers are 448 times powers of two, with ties."""
    x = randn(rows, channels + 3, seed=rows)[:, 1:-2]
    x = (
        x
        * torch.exp2(6 * randn(rows, -(-channels // 64), seed=9).clamp(-1, 1)).repeat_interleave(
            64, 1
        )[:, :channels]
    )
    x[-1, channels // 3] = 300.0
    x[rows // 2, :GROUP] = 0.0
    narrow = dtype == torch.float16  # no room for what becomes of the smallest and the largest
    x[rows // 3] *= 1.0 if narrow else 1e-6
    ties = torch.arange(rows * channels).view(rows, channels) * 37 % 256 / 16.0
    ties[:, ::5] = 0.0
    ties[:, 1::2] *= -1.0
    ties[:, ::GROUP] = LARGEST
    ties *= torch.exp2((torch.arange(rows)[:, None] % 7 - (11 if narrow else 3)).float())
    return [Inputs(x.to(dtype)), Inputs(ties.to(dtype), exact=True)]


# -- what is accepted ------------------------------------------------------------------


def rounded(x: Tensor, off: Tensor, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """What fp8 makes of x, and how far from that it may make numbers that are off by `off`."""
    exact = through_fp8(x, powers_of_two)
    farthest = []
    parts = (torch.split(each, GROUP, dim=-1) for each in (x.abs(), off, exact.abs()))
    for size, moved, made in zip(*parts, strict=True):
        low, high = (
            _scales((size + sign * moved).amax(-1, keepdim=True), powers_of_two) for sign in (-1, 1)
        )
        # a power of two is the one or the other, any other scale may be between them
        pairs = ((low, low), (high, high)) if powers_of_two else ((low, high),)
        reach = torch.zeros_like(made)
        for least, most in pairs:
            above = _code((size + moved) / least) * most - made
            below = made - _code((size - moved) / most) * least
            reach = torch.maximum(reach, torch.maximum(above, below))
        farthest.append(reach)
    return exact, torch.cat(farthest, dim=-1)


def _scales(amax: Tensor, powers_of_two: bool) -> Tensor:
    scales = amax.clamp_min(FLOOR) / LARGEST
    return scales.log2().ceil().exp2() if powers_of_two else scales


def _code(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


def _quantised(given: Inputs, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    x = given.x.double()
    off = torch.zeros_like(x) if given.exact else bounds.rounding(bounds.AROUND) * x.abs()
    return rounded(x, off, powers_of_two)


def _product(x: Tensor, off: Tensor, numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What x times a weight is, and how far off it may be."""
    sums = bounds.gemm(x, numbers, dtype) + off @ numbers.abs().T
    if torch.get_default_device().type == "cuda":
        sums += bounds.FP8_MMA * (x.abs() @ numbers.abs().T)
    return x @ numbers.T, sums


def _gated(
    given: Inputs, gate_up: Tensor, down: Tensor, powers_of_two: bool, limit: float | None
) -> tuple[Tensor, Tensor]:
    """The same of a gated MLP, whose middle goes through fp8 too."""
    dtype = given.x.dtype
    both, off = _product(*_quantised(given, powers_of_two), gate_up, dtype)
    off = off + bounds.stored(both, dtype)
    (gate, up), (off_gate, off_up) = both.chunk(2, -1), off.chunk(2, -1)
    middle, off_middle = bounds.gated(gate, up, off_gate, off_up, dtype, limit)
    exact, off = _product(*rounded(middle, off_middle, powers_of_two), down, dtype)
    return exact, off + bounds.stored(exact, dtype)


# -- the checks ------------------------------------------------------------------------


def linear(op: LinearOp, dtype: torch.dtype = torch.float32) -> None:
    for shape in MATRICES:
        for powers_of_two in (False, True):
            matrix = weight(*shape, seed=1, powers_of_two=powers_of_two)
            packed, numbers = op.pack(matrix), matrix.dequantise(torch.float64)
            for rows in ROWS:
                for given in inputs(rows, shape[1], dtype):
                    before = given.x.clone()
                    what = f"linear, {shape}, {rows} rows, {_kind(given, powers_of_two)}"
                    exact, sums = _product(*_quantised(given, powers_of_two), numbers, dtype)
                    stored = bounds.stored(exact, dtype)
                    for strided in (given.x, given.x.T.contiguous().T):
                        within(what, op.run(strided, packed), exact, sums + stored)
                        within(f"{what}, float32", op.run_wide(strided, packed), exact, sums)
                    require(torch.equal(given.x, before), "linear writes its input")


def _kind(given: Inputs, powers_of_two: bool) -> str:
    return f"{'ties' if given.exact else 'any numbers'}, {'ue8m0' if powers_of_two else 'float32'}"


def mlp(op: InvariantMLP[Opaque], dtype: torch.dtype = torch.float32) -> None:
    linear = fp8_linear()
    for powers_of_two, (hidden, width) in product((False, True), SIZES):
        gate_up, down = _mlp_weights(powers_of_two, hidden, width)
        limit = LIMIT if powers_of_two else None
        packed = op.pack(gate_up, down, linear, limit)
        numbers = gate_up.dequantise(torch.float64), down.dequantise(torch.float64)
        for rows in MLP_ROWS:
            for given in inputs(rows, hidden, dtype):
                exact, off = _gated(given, *numbers, powers_of_two, limit)
                what = f"mlp, {rows} rows, {_kind(given, powers_of_two)}"
                within(what, op.run(given.x, packed, linear), exact, off)


def _mlp_weights(
    powers_of_two: bool, hidden: int = HIDDEN, width: int = WIDTH
) -> tuple[Weight, Weight]:
    return (
        weight(2 * width, hidden, seed=2, powers_of_two=powers_of_two),
        weight(hidden, width, seed=3, powers_of_two=powers_of_two),
    )


def experts(op: InvariantExperts[Opaque], dtype: torch.dtype = torch.float32) -> None:
    linear, first = fp8_linear(), 2
    for powers_of_two, (hidden, width) in product((False, True), SIZES):
        gate_up, down = _expert_weights(powers_of_two, hidden, width)
        limit = LIMIT if powers_of_two else None
        packed = op.pack(gate_up, down, linear, limit)
        numbers = gate_up.dequantise(torch.float64), down.dequantise(torch.float64)
        for tokens in TOKENS:
            for given in inputs(tokens, hidden, dtype):
                ids, weights = _choices(tokens)
                exact, off = torch.zeros(2, tokens, hidden, dtype=torch.float64)
                for expert in range(EXPERTS):
                    at, place = (ids - first == expert).nonzero(as_tuple=True)
                    mine = Inputs(given.x[at], given.exact)
                    matrices = numbers[0][expert], numbers[1][expert]
                    each = _gated(mine, *matrices, powers_of_two, limit)
                    factor = weights[at, place, None].double()
                    rounding = bounds.rounding(bounds.AROUND) * each[0].abs()
                    exact.index_add_(0, at, factor * each[0])
                    off.index_add_(0, at, factor * (each[1] + rounding))
                what = f"experts, {tokens} tokens, {_kind(given, powers_of_two)}"
                ours = op.run(given.x, ids, weights, packed, linear, first)
                here = exact.norm(dim=-1) != 0
                off += bounds.stored(exact, dtype)
                within(what, ours[here], exact[here], off[here])


def _expert_weights(
    powers_of_two: bool, hidden: int = HIDDEN, width: int = WIDTH
) -> tuple[Weight, Weight]:
    return (
        weight(EXPERTS, 2 * width, hidden, seed=4, powers_of_two=powers_of_two),
        weight(EXPERTS, hidden, width, seed=5, powers_of_two=powers_of_two),
    )


def _choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Two more experts than are here, one before and one after them."""
    ids = randn(tokens, EXPERTS + 2, seed=6).argsort(1)[:, :CHOSEN] + 1
    return ids, randn(tokens, CHOSEN, seed=7).abs() + 0.1


def linear_bits(op: LinearOp) -> None:
    """Of a row and of a rank's rows of the weight: their own."""
    for powers_of_two in (False, True):
        matrix = weight(130, 300, seed=1, powers_of_two=powers_of_two)
        packed, x = op.pack(matrix), inputs(33, 300, torch.float32)[0].x
        whole = op.run(x, packed)
        for rows in _ROWS:
            require(torch.equal(op.run(x[rows], packed), whole[rows]), "linear: a row's bits")
        for start, stop in ((0, 65), (65, 130), (26, 52)):
            mine = op.run(x, op.pack(matrix.cut(0, Span(start, stop, 130))))
            require(torch.equal(mine, whole[:, start:stop]), "linear: bits of a rank's columns")


_ROWS = (slice(0, 1), slice(3, 20), slice(32, 33))


def mlp_bits(op: InvariantMLP[Opaque]) -> None:
    """The same, and in two steps as in one."""
    linear = fp8_linear()
    packed = op.pack(*_mlp_weights(True), linear)
    x = inputs(33, HIDDEN, torch.float32)[0].x
    whole = op.run(x, packed, linear)
    for rows in _ROWS:
        require(torch.equal(op.run(x[rows], packed, linear), whole[rows]), "mlp: a row's bits")
    twice = op.down(op.middle(x, packed, linear), packed, linear)
    require(torch.equal(twice, whole), "mlp: the bits of two steps")


def experts_bits(op: InvariantExperts[Opaque]) -> None:
    """Of a token, and of the sum over experts of two ranks."""
    linear, (gate_up, down) = fp8_linear(), _expert_weights(True)
    packed = op.pack(gate_up, down, linear)
    x, (ids, weights) = inputs(33, HIDDEN, torch.float32)[0].x, _choices(33)
    whole = op.run(x, ids, weights, packed, linear, 2)
    for rows in _ROWS:
        alone = op.run(x[rows], ids[rows], weights[rows], packed, linear, 2)
        require(torch.equal(alone, whole[rows]), "experts: a token's bits")
    each = torch.zeros(33, CHOSEN, HIDDEN)
    for half in (Span(0, 3, EXPERTS), Span(3, 6, EXPERTS)):
        mine, at = op.pack(gate_up.cut(0, half), down.cut(0, half), linear), 2 + half.start
        each += op.down(op.middle(x, ids, mine, linear, at), ids, mine, linear, at)
    require(torch.equal(op.combine(each, weights), whole), "experts: the bits of two ranks")
    ranks = [op.pack(*part, linear) for part in _halves(gate_up, down)]
    middle = torch.cat([op.middle(x, ids, mine, linear, 2) for mine in ranks], 2)
    given = [op.combine(op.down(middle, ids, mine, linear, 2), weights) for mine in ranks]
    require(torch.equal(torch.cat(given, 1), whole), "experts: the bits of two ranks, by width")


def _halves(gate_up: Weight, down: Weight) -> Iterator[tuple[Weight, Weight]]:
    """Of each of two ranks: its part of the width of gate and up, its rows of down."""
    width, hidden = gate_up.shape[1] // 2, down.shape[1]
    for at in range(2):
        first, half = at * width // 2, width // 2
        gate, up = (
            gate_up.cut(1, Span(first + begin, first + begin + half, 2 * width))
            for begin in (0, width)
        )
        rows = Span(at * hidden // 2, (at + 1) * hidden // 2, hidden)
        yield Weight.concat((gate, up), 1), down.cut(1, rows)
