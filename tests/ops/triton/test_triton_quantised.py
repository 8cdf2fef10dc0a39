"""GEMMs and experts on codes as they are stored, on a GPU: line by line on this CPU, against
float64 products with the dequantised numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueline.ops.codes import codes_of
from trueline.ops.experts import reference as experts_reference
from trueline.ops.experts import triton_quantised as experts
from trueline.ops.linear import triton_quantised as linear
from trueline.ops.registry import implementation
from trueline.verify.ops import OP_CHECKS
from trueline.verify.ops.data import torch_linear
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.fp4 import Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored
from trueline.weights.value import StoredPart, Weight

FORMS = ("fp8", "int4", "fp4")
GATE = 2e-6
BLOCK = 16


def stored(form: str, rows: int, columns: int, seed: int) -> Fp8Stored | Int4Stored | Fp4Stored:
    """All codes, scales over twelve powers of two, and a group of zeros."""
    draw = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    if form == "fp8":
        codes = whole(0, 256, rows, columns).to(torch.uint8)
        codes[codes & 127 == 127] = 128  # no NaN; −0 instead
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        scales = 1.3 * torch.exp2(whole(-18, -6, *blocks).float())
        return Fp8Stored(codes.view(torch.float8_e4m3fn), scales, (BLOCK, BLOCK))
    groups = -(-columns // 32)
    if form == "int4":
        packed = whole(-(2**31), 2**31, rows, -(-columns // 8)).to(torch.int32)
        packed[0] = -2004318072  # 8 in every nibble: zero
        scales = (1.3 * torch.exp2(whole(-14, -2, rows, groups).float())).bfloat16()
        return Int4Stored(packed, scales, 32, columns)
    packed = whole(0, 256, rows, -(-columns // 2)).to(torch.uint8)
    packed[0] = 0x80  # 0 and −0
    return Fp4Stored(packed, whole(113, 125, rows, groups).to(torch.uint8), columns)


def matrix(
    form: str, rows: int, columns: int, *, parts: int = 1, cut: int = 0, seed: int = 0
) -> Weight:
    """`parts` under each other; of wider ones, without their first `cut` columns."""
    made = []
    for i in range(parts):
        one = stored(form, rows, columns + cut, seed=10 * seed + i)
        kept = one.cut(1, cut, columns + cut)
        made.append(StoredPart(kept, form, (i * rows, 0)))
    return Weight((parts * rows, columns), torch.float32, tuple(made))


def stacked(matrices: list[Weight]) -> Weight:
    parts = tuple(
        StoredPart(part.stored, part.format, (i, *part.begin))
        for i, one in enumerate(matrices)
        for part in one.parts
    )
    return Weight((len(matrices), *matrices[0].shape), torch.float32, parts)


def worst(got: Tensor, exact: Tensor) -> float:
    """Of all rows: the error's length over the row's."""
    return float(((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 16, 31])
def test_codes_keep_every_number(form: str, cut: int) -> None:
    """Read as the docstring says."""
    for rows, columns, parts in ((16, 64, 1), (24, 33, 2), (5, 1, 3), (17, 96, 1)):
        weight = matrix(form, rows, columns, parts=parts, cut=cut)
        codes = codes_of(weight)
        numbers = codes.numbers[0]
        if form != "fp8":
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)[:, :columns]
        if form == "int4":
            values = numbers.float() - 8
        elif form == "fp8":
            values = numbers.view(torch.float8_e4m3fn).float()
        else:
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            values = torch.where(numbers > 7, -1.0, 1.0) * table[(numbers & 7).int()]
        scales = codes.scales[0]
        scales = scales.view(torch.float8_e8m0fnu).float() if form == "fp4" else scales.float()
        row = torch.arange(len(values)) // codes.rows_per_scale
        column = torch.arange(columns) // codes.group
        assert torch.equal(values * scales[row][:, column], weight.dequantise())


@pytest.mark.parametrize("form", FORMS)
def test_linear(form: str) -> None:
    for count, rows, columns, parts, cut in (
        (1, 16, 64, 1, 0), (3, 65, 129, 2, 0), (17, 33, 95, 1, 16), (64, 9, 31, 3, 1),
        (65, 64, 128, 1, 5),
    ):  # fmt: skip
        weight = matrix(form, rows, columns, parts=parts, cut=cut)
        x = randn(count, columns)
        exact = x.double() @ weight.dequantise().double().T
        packed = linear.pack(weight)
        assert worst(linear.run(x, packed), exact) < GATE
        wide = linear.run_wide(x.half(), packed)
        assert wide.dtype == torch.float32
        rounded = x.half().double() @ weight.dequantise(torch.float16).double().T
        assert worst(wide, rounded) < GATE


@pytest.mark.parametrize("form", FORMS)
def test_experts(form: str) -> None:
    """Tiles that are full, almost or hardly; an expert that nobody takes, and a rank's share."""
    for hidden, width, tokens, cut in ((64, 32, 5, 0), (72, 40, 33, 16), (33, 65, 70, 7)):
        gate_up = [matrix(form, width, hidden, parts=2, seed=e) for e in range(4)]
        down = [matrix(form, hidden, width, cut=cut, seed=e) for e in range(4)]
        packed = experts.pack(stacked(gate_up), stacked(down), None)
        x, weights = randn(tokens, hidden), randn(tokens, 2).abs() + 0.1
        ids = torch.stack([torch.randperm(3)[:2] + (i % 5 == 0) for i in range(tokens)])
        exact_of = experts_reference.pack(
            stacked(gate_up).dequantise().double(), stacked(down).dequantise().double(), None
        )
        exact = experts_reference.run(x.double(), ids, weights.double(), exact_of, None)
        for rows in (16, 64):
            got = experts.run_with(experts.Tiles(rows), x, ids, weights, packed)
            assert worst(got, exact) < GATE
        share = experts.run(x, ids + 2, weights, packed, None, first=2)
        assert worst(share, exact) < GATE


@pytest.mark.parametrize("op", ["linear", "experts"])
def test_conforms(op: str) -> None:
    check = next(check for check in OP_CHECKS[op] if check.stored)
    check.run(implementation(op, "triton_quantised"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batched_gemm(dtype: torch.dtype) -> None:
    """Whole published blocks stay as they are stored; others are dequantised."""
    op = implementation("batched_gemm", "triton")
    (check,) = (each for each in OP_CHECKS["batched_gemm"] if each.stored)
    check.run(op, dtype)
    kept = matrix("fp8", 256, 128).stacked(2)
    assert isinstance(op.pack(kept, torch_linear(), False), Tensor)
