"""Stored formats: what the numbers are by definition, one by one, and wherever they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trueline.weights.formats import Stored
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.fp4 import Fp4, Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Made = tuple[Stored, Tensor]


def int4(
    rows: int, columns: int, group: int = 32, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Made:
    """Random words; scales over twelve powers of two, one group in eight all zeros (code 8)."""
    generator = torch.Generator().manual_seed(seed)
    words, groups = -(-columns // 8), -(-columns // group)
    packed = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).int()
    powers = torch.randint(-6, 7, (rows, groups), generator=generator)
    scales = ((1 + torch.rand(rows, groups, generator=generator)) * 2.0**powers).to(dtype)
    if columns % group == 0 and columns >= group:
        packed[::8, : group // 8] = -0x77777778  # 0x88888888: zeros
    exact = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            word = int(packed[row, column // 8]) % 2**32
            number = (word >> 4 * (column % 8)) % 16 - 8
            exact[row, column] = number * scales[row, column // group].float()
    return Int4Stored(packed, scales, group, columns), exact


def fp4(rows: int, columns: int, seed: int = 0) -> Made:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, -(-columns // 2)), generator=generator).to(torch.uint8)
    scales = torch.randint(121, 134, (rows, -(-columns // 32)), generator=generator)
    packed[::8, :16] = 0x80  # plus and minus zero
    exact = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            code = (int(packed[row, column // 2]) >> 4 * (column % 2)) % 16
            sign = -1.0 if code >= 8 else 1.0
            exponent = int(scales[row, column // 32]) - 127
            exact[row, column] = math.ldexp(sign * E2M1[code % 8], exponent)
    return Fp4Stored(packed, scales.to(torch.uint8), columns), exact


def fp8(rows: int, columns: int, block: tuple[int, int] = (4, 48)) -> Made:
    """Every code but NaN, the largest (448) and minus zero among them; partial blocks at the edges,
    scales over twelve powers of two."""
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 256, (rows, columns), generator=generator)
    codes[codes % 128 == 127] -= 1
    codes[0, : columns // 2] = 0x80
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    grid = [-(-size // side) for size, side in zip((rows, columns), block, strict=True)]
    powers = torch.randint(-6, 7, grid, generator=generator)
    scales = (1 + torch.rand(grid, generator=generator)) * 2.0**powers
    exact = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            scale = scales[row // block[0], column // block[1]]
            exact[row, column] = e4m3(int(codes[row, column])) * scale
    return Fp8Stored(numbers, scales, block), exact


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    number = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return math.copysign(number, -1 if code >> 7 else 1)


FORMS: dict[str, Callable[[int, int], Made]] = {
    "int4-32": lambda rows, columns: int4(rows, columns),
    "int4-128": lambda rows, columns: int4(rows, columns, 128),
    "int4-8-f32": lambda rows, columns: int4(rows, columns, 8, torch.float32),
    "int4-16-f16": lambda rows, columns: int4(rows, columns, 16, torch.float16),
    "fp4": fp4,
    "block-fp8": fp8,
}


def same(ours: Tensor, wanted: Tensor) -> bool:
    """Bit for bit, signs of zeros included."""
    return ours.dtype == torch.float32 and torch.equal(
        ours.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [256, 200, 33, 7])
def test_numbers_by_definition(form: str, columns: int) -> None:
    stored, exact = FORMS[form](9, columns)
    assert stored.shape == (9, columns)
    assert same(stored.dequantise(), exact)


@pytest.mark.parametrize("form", FORMS)
def test_cuts_at_every_column(form: str) -> None:
    stored, exact = FORMS[form](3, 150)
    for start in range(150):
        ends = (start + length for length in (1, 2, 7, 8, 9, 31, 32, 33, 150 - start))
        for stop in (end for end in ends if end <= 150):
            cut = stored.cut(1, start, stop)
            assert cut.shape == (3, stop - start)
            assert cut.nbytes <= stored.nbytes
            assert same(cut.dequantise(), exact[:, start:stop])


@pytest.mark.parametrize("form", FORMS)
def test_cuts_of_cuts(form: str) -> None:
    stored, exact = FORMS[form](12, 300)
    once = stored.cut(1, 37, 290).cut(0, 3, 11)
    for start in range(0, 200, 3):
        twice = once.cut(1, start, start + 53).cut(0, 2, 5)
        assert same(twice.dequantise(), exact[5:8, 37 + start : 90 + start])


@pytest.mark.parametrize("form", ["int4-32", "int4-8-f32", "fp4"])
def test_a_needle_is_one_number(form: str) -> None:
    """One code among zeros: it shows at its column and nowhere else, wherever that is."""
    zero, needle = (0, 7) if form == "fp4" else (-0x77777778, None)
    stored, _ = FORMS[form](1, 96)
    assert isinstance(stored, (Fp4Stored, Int4Stored))
    for column in range(96):
        packed = torch.full_like(stored.packed, zero)
        if needle is None:
            packed[0, column // 8] ^= 0b1111 << 4 * (column % 8) if column % 8 < 7 else -(1 << 28)
        else:
            packed[0, column // 2] = needle << 4 * (column % 2)
        numbers = replace(stored, packed=packed).dequantise()[0]
        assert numbers.nonzero().flatten().tolist() == [column]
        scale = stored.scales[0, column // stored.group]
        largest = math.ldexp(6.0, int(scale) - 127) if needle else -1 * float(scale)
        assert numbers[column].item() == largest


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_is_of_one_group(form: str) -> None:
    stored, exact = FORMS[form](8, 200)
    assert isinstance(stored, (Fp4Stored, Int4Stored, Fp8Stored))
    for row, group in [(0, 0), (1, 1), (len(stored.scales) - 1, stored.scales.shape[1] - 1)]:
        scales = stored.scales.clone()
        if form == "fp4":
            scales[row, group] += 1
        else:
            scales[row, group] *= 2
        changed = (replace(stored, scales=scales).dequantise() != exact).nonzero()
        tall, wide = stored.block if isinstance(stored, Fp8Stored) else (1, stored.group)
        assert {int(at) // tall for at in changed[:, 0]} <= {row}
        assert {int(at) // wide for at in changed[:, 1]} <= {group}
        assert len(changed) or exact[row * tall, group * wide] == 0


@pytest.mark.parametrize("form", [form for form in FORMS if form != "block-fp8"])
def test_a_cut_on_the_edges_of_groups_keeps_nothing_more(form: str) -> None:
    stored, _ = FORMS[form](4, 1024)
    parts = [stored.cut(1, start, start + 256) for start in range(0, 1024, 256)]
    assert sum(part.nbytes for part in parts) == stored.nbytes


def test_every_nibble_and_scale_of_fp4() -> None:
    """Exponents at both ends of float32: subnormal products are exact too."""
    codes = torch.arange(256).to(torch.uint8).repeat(16, 1)
    for byte in (0, 1, 2, 127, 251, 252):
        scales = torch.full((16, 16), byte).to(torch.uint8)
        assert Fp4(ignored_modules=()).open((), (codes, scales)).shape == (16, 512)
        numbers = Fp4Stored(codes, scales, 512).dequantise()
        for column in range(512):
            code = column // 2 % 16 if column % 2 == 0 else column // 2 // 16
            wanted = math.ldexp(math.copysign(E2M1[code % 8], -1 if code > 7 else 1), byte - 127)
            assert numbers[3, column].item() == wanted
            assert math.copysign(1, numbers[3, column].item()) == math.copysign(1, wanted)
