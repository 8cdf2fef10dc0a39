"""Kernels that multiply with weights as they are stored. A number is code × scale rounded to
float32, as `dequantise` gives it, so nothing may differ by a bit from the same numbers in float32:
wherever blocks, groups, words, parts, panels and rows begin and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline import native
from trueline.device import compiler, cpu_features
from trueline.ops.experts import reference as experts_reference
from trueline.ops.registry import implementation
from trueline.spec.source import Span
from trueline.verify import bounds
from trueline.verify.ops import randn
from trueline.weights.formats import Stored
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.dense import DenseStored
from trueline.weights.formats.fp4 import Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored
from trueline.weights.value import StoredPart, Weight

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="no native kernels here")
LINEAR, MLP, EXPERTS = (implementation(op, "native") for op in ("linear", "mlp", "experts"))
PANEL = 32
"""The widest that there is."""
MANY = 2 * 8 + 3
"""Rows for which a panel is made plain numbers first, and some more."""
Make = Callable[[int, int, int], Weight]


def weight(stored: Stored, label: str) -> Weight:
    return Weight(stored.shape, torch.float32, (StoredPart(stored, label, (0, 0)),))


def powers(*shape: int, seed: int) -> Tensor:
    """Over twelve powers of two."""
    return torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed))


def fp8(rows: int, columns: int, seed: int, block: tuple[int, int] = (24, 16)) -> Weight:
    """All codes but NaN, among them both zeros and both largest."""
    codes = torch.randint(256, (rows, columns), generator=torch.Generator().manual_seed(seed))
    codes = torch.where(codes % 128 == 127, codes - 1, codes).to(torch.uint8)
    codes[: block[0], : block[1]] = 0x80  # a block of zeros
    grid = tuple(-(-size // of) for size, of in zip((rows, columns), block, strict=True))
    scales = (1 + randn(*grid, seed=seed).sigmoid()) * 2.0 ** powers(*grid, seed=seed)
    return weight(Fp8Stored(codes.view(torch.float8_e4m3fn), scales, block), "block fp8")


def int4(
    rows: int, columns: int, seed: int, group: int = 16, dtype: torch.dtype = torch.bfloat16
) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (rows, -(-columns // 8)), generator=generator).int()
    packed[0, : group // 8] = -0x77777778  # 0x88888888: a group of zeros
    groups = (rows, -(-columns // group))
    scales = (1 + randn(*groups, seed=seed).sigmoid()) * 2.0 ** powers(*groups, seed=seed)
    return weight(Int4Stored(packed, scales.to(dtype), group, columns), "int4")


def fp4(rows: int, columns: int, seed: int) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (rows, -(-columns // 2)), generator=generator).to(torch.uint8)
    packed[0, :16] = 0x08  # a group of zeros, each second one negative
    scales = 127 + powers(rows, -(-columns // 32), seed=seed)
    return weight(Fp4Stored(packed, scales.to(torch.uint8), columns), "fp4")


FORMATS: dict[str, Make] = {
    "block fp8": fp8,
    "block fp8, a row each": lambda *sizes: fp8(*sizes, block=(1, 8)),
    "int4": int4,
    "int4, float16": lambda *sizes: int4(*sizes, group=8, dtype=torch.float16),
    "int4, float32": lambda *sizes: int4(*sizes, group=32, dtype=torch.float32),
    "fp4": fp4,
}
each_format = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)


def same_bits(stored: Weight, rows: tuple[int, ...] = (1, 3, MANY)) -> None:
    packed, plain = LINEAR.pack(stored), LINEAR.pack(stored.dequantise())
    assert packed.data.dtype == torch.uint8, "it was dequantised"
    for count in rows:
        x = randn(count, stored.shape[1], seed=1)
        assert torch.equal(LINEAR.run(x, packed), LINEAR.run(x, plain)), f"{count} rows"


@each_format
def test_every_number(make: Make) -> None:
    """Rows of the identity read the weight out, a few at a time and all at once."""
    for shape in ((PANEL + 3, 53), (7, 130)):
        stored = make(*shape, 0)
        packed, exact = LINEAR.pack(stored), stored.dequantise()
        once = torch.eye(shape[1])
        few = torch.cat([LINEAR.run(some, packed) for some in once.split(5)])
        assert torch.equal(few.T, exact)
        assert torch.equal(LINEAR.run(once, packed).T, exact)


@each_format
def test_products_of_any_shape(make: Make) -> None:
    """Every residue of columns modulo a panel, and of inner numbers modulo a block."""
    for columns in range(1, PANEL + 2):
        same_bits(make(columns, 19, columns), (2, MANY))
    for inner in range(1, 35):
        same_bits(make(5, inner, inner))


@each_format
def test_rows_do_not_change_each_other(make: Make) -> None:
    packed, x = LINEAR.pack(make(PANEL + 5, 70, 0)), randn(MANY, 70)
    whole = LINEAR.run(x, packed)
    for count in range(1, MANY):
        for first in (0, MANY - count):
            rows = slice(first, first + count)
            assert torch.equal(LINEAR.run(x[rows], packed), whole[rows])


@each_format
def test_parts_and_cuts(make: Make) -> None:
    """Parts whose blocks do not line up, cut anywhere: along rows, and along columns inside of
    blocks, groups and words."""
    parts = [make(rows, 50, rows) for rows in (33, 19, 40)]
    both = Weight.concat(parts)
    same_bits(both)
    for start in range(0, 50, 3):
        same_bits(both.cut(0, Span(start, start + 37, 92)), (3,))
        same_bits(both.cut(1, Span(start, 50, 50)).cut(0, Span(5, 80, 92)), (3,))
        same_bits(both.cut(1, Span(start // 3, start + 1, 50)), (MANY,))
    beside = Weight.concat((parts[0], make(33, 21, 7)), axis=1)
    same_bits(beside)
    same_bits(beside.cut(1, Span(29, 66, 71)))


@each_format
def test_a_needle_in_each_lane(make: Make) -> None:
    """One number far larger than all others, in float64: what is read in its place shows."""
    stored = make(PANEL + 1, 40, 3)
    exact, packed = stored.dequantise().double(), LINEAR.pack(stored)
    for inner in range(40):
        x = randn(1, 40, seed=inner)
        x[0, inner] = 1e4
        ours = LINEAR.run(x, packed)
        accepted = bounds.gemm(x, stored.dequantise(), torch.float32)
        bounds.require_within("needle", ours.T, (x.double() @ exact.T).T, accepted.T)


def stack(*weights: Weight) -> Weight:
    """Experts."""
    parts = [
        StoredPart(part.stored, part.format, (expert, *part.begin))
        for expert, weight in enumerate(weights)
        for part in weight.parts
    ]
    return Weight((len(weights), *weights[0].shape), torch.float32, tuple(parts))


def small(weight: Weight) -> float:
    """What makes the outputs of a GEMM with it about as large as its inputs."""
    return math.sqrt(weight.shape[-2]) / max(float(weight.dequantise().norm()), 1.0)


def shapes() -> Iterator[tuple[int, int, int]]:
    for width in (1, 7, 8, 9, 15, 16, 17, 31, 33, 40):
        yield 1 + width % 9, 20 + width, width
    yield MANY, 37, 50


@each_format
def test_mlp(make: Make) -> None:
    for rows, hidden, width in shapes():
        gate, up, down = make(width, hidden, 1), make(width, hidden, 2), make(hidden, width, 3)
        gate_up = Weight.concat((gate, up))
        packed = MLP.pack(gate_up, down, LINEAR)
        assert packed.gate_up.dtype == packed.down.dtype == torch.uint8
        plain = MLP.pack(gate_up.dequantise(), down.dequantise(), LINEAR)
        x = randn(rows, hidden, seed=4) * small(gate_up)
        ours = MLP.run(x, packed, LINEAR)
        assert torch.equal(ours, MLP.run(x, plain, LINEAR))
        middle = MLP.middle(x, packed, LINEAR)
        assert torch.equal(middle, MLP.middle(x, plain, LINEAR))
        assert torch.equal(MLP.down(middle, packed, LINEAR), ours)
        assert torch.equal(MLP.run(x[-1:], packed, LINEAR), ours[-1:])
        exact = implementation("mlp", "reference")
        wanted = exact.run(x.double(), exact.pack(gate_up, down, LINEAR), LINEAR)
        accepted = bounds.mlp(x, gate_up.dequantise(), down.dequantise(), torch.float32)
        bounds.require_within("mlp", ours, wanted, accepted)


@each_format
def test_experts(make: Make) -> None:
    """Of one rank: some of the tokens' experts are held elsewhere."""
    for rows, hidden, width in shapes():
        gate_up = stack(*(make(2 * width, hidden, seed) for seed in (1, 2, 3)))
        down = stack(*(make(hidden, width, seed) for seed in (4, 5, 6)))
        packed = EXPERTS.pack(gate_up, down, LINEAR)
        assert packed.gate_up.dtype == packed.down.dtype == torch.uint8
        numbers = gate_up.dequantise(), down.dequantise()
        plain = EXPERTS.pack(*numbers, LINEAR)
        x, weights = randn(rows, hidden, seed=6) * small(gate_up), randn(rows, 2, seed=7)
        ids = randn(rows, 6, seed=8).argsort(1)[:, :2]
        ours = EXPERTS.run(x, ids, weights, packed, LINEAR, 2)
        assert torch.equal(ours, EXPERTS.run(x, ids, weights, plain, LINEAR, 2))
        middle = EXPERTS.middle(x, ids, packed, LINEAR, 2)
        assert torch.equal(middle, EXPERTS.middle(x, ids, plain, LINEAR, 2))
        parts = EXPERTS.down(middle, ids, packed, LINEAR, 2)
        assert torch.equal(parts, EXPERTS.down(middle, ids, plain, LINEAR, 2))
        exact = experts_reference.run(
            x.double(), ids, weights.double(), experts_reference.pack(*numbers, None), None, 2
        )
        accepted = torch.zeros_like(exact)
        for expert in range(3):
            share = (weights.abs() * (ids == expert + 2)).sum(1, keepdim=True)
            each = (number[expert] for number in numbers)
            accepted += share * bounds.mlp(x, *each, torch.float32)
        accepted += bounds.rounding(2) * (parts.abs() * weights.abs()[..., None]).sum(1)
        bounds.require_within("experts", ours, exact, accepted)


def test_experts_whose_blocks_begin_elsewhere() -> None:
    """Their packed forms differ in size, and still follow each other."""
    gate_up = stack(*(fp8(70, 40, at).cut(0, Span(at, at + 34, 70)) for at in (0, 5, 23)))
    down = stack(*(fp8(40, 17, seed) for seed in range(3)))
    x, ids = randn(4, 40) / 1000, torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]])
    ours, plain = (
        EXPERTS.run(x, ids, torch.ones(4, 2), EXPERTS.pack(a, b, LINEAR), LINEAR)
        for a, b in ((gate_up, down), (gate_up.dequantise(), down.dequantise()))
    )
    assert torch.equal(ours, plain)


def test_two_formats_in_one_mlp_are_dequantised() -> None:
    gate_up, down = fp8(34, 20, 0), int4(20, 17, 1)
    packed = MLP.pack(gate_up, down, LINEAR)
    assert packed.gate_up.dtype == packed.down.dtype == torch.float32
    mixed = Weight.concat((fp8(5, 20, 0), weight(DenseStored(randn(7, 20)), "dense")))
    assert LINEAR.pack(mixed).data.dtype == torch.float32


def test_scales_that_leave_no_room_are_dequantised() -> None:
    """A 256th of e4m3 times 256 scales: the last powers of two have none."""
    codes = torch.full((3, 5), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # ones
    stored = weight(Fp8Stored(codes, torch.full((1, 1), 2.0**120), (24, 16)), "block fp8")
    assert torch.equal(LINEAR.run(torch.eye(5), LINEAR.pack(stored)), torch.full((5, 3), 2.0**120))


def test_scales_at_the_ends_of_float32() -> None:
    """Subnormal ones, and the largest with which every number is finite."""
    pairs = torch.arange(256).to(torch.uint8).repeat(40, 1)
    for byte in (0, 1, 252):
        numbers = weight(Fp4Stored(pairs, torch.full((40, 16), byte).to(torch.uint8), 512), "fp4")
        assert torch.equal(LINEAR.run(torch.eye(512), LINEAR.pack(numbers)).T, numbers.dequantise())
    words = pairs.view(torch.int32)
    for scale in (2.0**-24, 3 * 2.0**-20, 2.0**-14, 65504.0):
        scales = torch.full((40, 16), scale, dtype=torch.float16)
        numbers = weight(Int4Stored(words, scales, 32, 512), "int4")
        assert torch.equal(LINEAR.run(torch.eye(512), LINEAR.pack(numbers)).T, numbers.dequantise())
    codes = torch.where(pairs % 128 == 127, 0, pairs).view(torch.float8_e4m3fn)
    for scale in (2.0**-149, 3 * 2.0**-140, 1.3 * 2.0**118):
        numbers = weight(Fp8Stored(codes, torch.full((2, 8), scale), (32, 32)), "block fp8")
        assert torch.equal(LINEAR.run(torch.eye(256), LINEAR.pack(numbers)).T, numbers.dequantise())


def published(label: str, rows: int, columns: int) -> Weight:
    """With the blocks and groups of published checkpoints; all zeros."""
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    if label == "block fp8":
        scales = torch.ones(-(-rows // 128), -(-columns // 128))
        return weight(Fp8Stored(codes.view(torch.float8_e4m3fn), scales, (128, 128)), label)
    if label == "int4":
        scales = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
        return weight(
            Int4Stored(codes[:, ::2].contiguous().view(torch.int32), scales, 32, columns), label
        )
    scales = codes[:, ::32].contiguous()
    return weight(Fp4Stored(codes[:, ::2].contiguous(), scales, columns), label)


@pytest.mark.parametrize("label", ["block fp8", "int4", "fp4"])
def test_packed_bytes(label: str) -> None:
    """Within 3 % of the stored ones: q_a with kv_a (576 rows: a partial block), a rank's gate and
    up that begin inside of a block, a rank's down that does so along columns."""
    fused = Weight.concat((published(label, 1536, 2048), published(label, 576, 2048)))
    gate, up = (published(label, 1408, 2048).cut(0, Span(352, 704, 1408)) for _ in range(2))
    down = published(label, 2048, 1408).cut(1, Span(352, 704, 1408))
    mlp = MLP.pack(Weight.concat((gate, up)), down, LINEAR)
    kept = (LINEAR.pack(fused).data, mlp.gate_up, mlp.down)
    stored = (fused.nbytes, gate.nbytes + up.nbytes, down.nbytes)
    for ours, theirs in zip(kept, stored, strict=True):
        assert ours.nbytes <= 1.03 * theirs


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_on_other_cpus(fresh: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX2, with it, and with AVX-512. Or a reason; never code that this CPU does not
    have."""
    monkeypatch.setitem(native.TARGETS, "x86-64", ())
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", target)
    missing = set(native.TARGETS[target]) - set(cpu_features().split())
    if missing and compiler():
        assert "this CPU has no" in (native.unavailable() or "")
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    assert native.panel() == (32 if target == "x86-64-v4" else 16)
    for make in FORMATS.values():
        same_bits(make(PANEL + 5, 41, 0))
    (first,) = fresh.iterdir()
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", "off")
    native.library.cache_clear()
    native.unavailable.cache_clear()
    assert native.unavailable() == "TRUELINE_NATIVE_TARGET is off"
    assert list(fresh.iterdir()) == [first]
