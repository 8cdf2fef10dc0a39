"""Fragments keep every code and every scale, each where a thread of the kernels looks for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueline.ops.codes import codes_of
from trueline.ops.experts.fragments import Fragments, fragments_of
from trueline.ops.experts.hopper_w4a16 import launch, pack, streamed
from trueline.ops.experts.quantised_kernels import permute_columns
from trueline.ops.experts.triton_quantised import Packed as Codes
from trueline.spec.source import Span
from trueline.weights.formats.fp4 import Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored
from trueline.weights.value import StoredPart, Weight

ZERO_CODES = {"int4": 8, "fp4": 0}
FP4_BITS = ((0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 6, 13), (14, 7, 8, 15))
"""Of a word's lower fp4 codes: where each of the four has its bits; the others' stand 16 on."""


def experts(form: str, count: int, rows: int, columns: int, group: int = 32) -> Weight:
    """All codes and scales drawn; each expert's gate and up (or halves of down) a part."""
    draw = torch.Generator().manual_seed(rows + columns)
    parts = []
    for expert in range(count):
        for begin in (0, rows // 2):
            height = rows // 2 if begin == 0 else rows - rows // 2
            packed = torch.randint(0, 256, (height, columns // 2), generator=draw).to(torch.uint8)
            groups = height, -(-columns // group)
            if form == "int4":
                scales = torch.rand(groups, generator=draw).bfloat16()
                stored = Int4Stored(packed.view(torch.int32), scales, group, columns)
            else:
                scales = torch.randint(0, 129, groups, generator=draw).to(torch.uint8)
                stored = Fp4Stored(packed, scales, columns)
            parts.append(StoredPart(stored, form, (expert, begin, 0)))
    return Weight((count, rows, columns), torch.bfloat16, tuple(parts))


def row_at(tile: int, warp: int, half: int, lane_row: int, width: int, gated: bool) -> int | None:
    """Which row of the matrix a thread of the tensor cores has there; None: padding."""
    if not gated:
        row = tile * 64 + warp * 16 + half * 8 + lane_row
        return row if row < width else None
    row = tile * 32 + warp * 8 + lane_row
    return row + half * width if row < width else None


def code_at(words: Tensor, form: str, number: int) -> Tensor:
    if form == "int4":
        return words >> 4 * number & 15
    places = ((place + number // 4 * 16) % 32 for place in FP4_BITS[number % 4])
    return torch.stack([(words >> place & 1) << i for i, place in enumerate(places)]).sum(0)


def unpacked(weight: Fragments, rows: int, gated: bool) -> tuple[Tensor, Tensor]:
    """Codes [matrices, rows, columns] and scales [matrices, rows, groups], read as the kernels
    do; -1 where no thread reads any. Padding must be zeros."""
    count, tiles, chunks, _, _ = weight.words.shape
    words = weight.words.view(count, tiles, chunks, 4, 8, 4, 2, 2).long() & 0xFFFFFFFF
    width = rows // 2 if gated else rows
    codes = torch.full((count, rows, chunks * 64), -1)
    groups = -(-chunks * 64 // weight.group)
    scales = torch.full((count, rows, groups), -1.0)
    steps, each = weight.columns // 256, 256 // weight.group
    for tile in range(tiles):
        for place in range(64):
            warp, half, lane_row = place // 16, place // 8 % 2, place % 8
            row = row_at(tile, warp, half, lane_row, width, gated)
            mine = words[:, tile, :, warp, lane_row, :, :, half]  # chunk, quad, block
            found = torch.empty(count, chunks, 2, 4, 8, dtype=torch.long)
            for nibble in range(8):
                # nibbles n and n + 4 are the pair of MMA n // 2, its half n % 2
                column = nibble % 4 * 2 + nibble // 4
                found[..., column] = code_at(mine, weight.form, nibble).transpose(-1, -2)
            if row is None:
                assert (found == ZERO_CODES[weight.form]).all()
                continue
            codes[:, row] = found.flatten(1)
            for group in range(groups):
                step = group // each
                of_step = each if step < steps else groups - steps * each
                at = step * 64 * each + place * of_step + group % each
                scales[:, row, group] = weight.scales[:, tile, at].float()
    return codes, scales


SHAPES = [
    ("int4", 64, 256, 32),
    ("int4", 130, 544, 32),
    ("int4", 6, 32, 32),
    ("int4", 66, 448, 64),
    ("int4", 64, 896, 128),
    ("int4", 20, 128, 128),
    ("int4", 20, 192, 96),
    ("fp4", 128, 320, 32),
    ("fp4", 34, 736, 32),
]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("form", "rows", "columns", "group"), SHAPES)
def test_every_code_and_scale(form: str, rows: int, columns: int, group: int, gated: bool) -> None:
    weight = experts(form, 2, rows, columns, group)
    packed = fragments_of(weight, gated=gated)
    assert packed is not None
    codes, scales = unpacked(packed, rows, gated)
    exact = codes_of(weight)
    nibbles = torch.stack((exact.numbers & 15, exact.numbers >> 4), -1).flatten(2)
    assert torch.equal(codes[..., :columns], nibbles.long())
    assert (codes[..., columns:] == ZERO_CODES[form]).all()
    wanted = exact.scales.repeat_interleave(group // packed.group, 2).float()
    assert torch.equal(scales[..., : wanted.shape[2]], wanted)
    assert (scales[..., wanted.shape[2] :] == 0).all()


@pytest.mark.parametrize("form", ["int4", "fp4"])
@pytest.mark.parametrize(("start", "stop"), [(0, 96), (32, 160), (64, 97), (96, 320)])
def test_cuts_between_groups(form: str, start: int, stop: int) -> None:
    weight = experts(form, 2, 32, 320).cut(2, Span(start, stop, 320))
    packed = fragments_of(weight, gated=False)
    assert packed is not None
    codes, _ = unpacked(packed, 32, False)
    exact = codes_of(weight).numbers
    nibbles = torch.stack((exact & 15, exact >> 4), -1).flatten(2)[..., : stop - start]
    assert torch.equal(codes[..., : stop - start], nibbles.long())
    assert (codes[..., stop - start :] == ZERO_CODES[form]).all()


def test_cuts_inside_a_group_stay_codes() -> None:
    gate_up, down = experts("int4", 2, 64, 64), experts("int4", 2, 64, 64)
    inside = down.cut(2, Span(16, 48, 64))
    assert fragments_of(inside, gated=False) is None
    assert isinstance(pack(gate_up, inside, None), Codes)
    assert fragments_of(experts("int4", 1, 16, 64, 16), gated=False) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_with_more_digits_stay_codes(dtype: torch.dtype) -> None:
    packed = torch.zeros(64, 8, dtype=torch.int32)
    stored = Int4Stored(packed, torch.ones(64, 2, dtype=dtype), 32, 64)
    weight = Weight((1, 64, 64), torch.bfloat16, (StoredPart(stored, "int4", (0, 0, 0)),))
    assert fragments_of(weight, gated=False) is None


@pytest.mark.parametrize("largest", [128, 129])
def test_large_scales_of_fp4_stay_codes(largest: int) -> None:
    packed, scales = torch.zeros(64, 32).to(torch.uint8), torch.zeros(64, 2).to(torch.uint8)
    scales[63, 1] = largest
    stored = Fp4Stored(packed, scales, 64)
    weight = Weight((1, 64, 64), torch.bfloat16, (StoredPart(stored, "fp4", (0, 0, 0)),))
    assert (fragments_of(weight, gated=False) is None) == (largest == 129)


@pytest.mark.parametrize(("form", "group"), [("int4", 32), ("int4", 128), ("fp4", 32)])
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_packed_bytes(form: str, group: int, ranks: int) -> None:
    """Within 3 % of the stored ones, also of a rank's share of Kimi-K2.5's width."""
    width, hidden = 2048 // ranks, 7168
    gate_up = fragments_of(experts(form, 1, 2 * width, hidden, group), gated=True)
    down = fragments_of(experts(form, 1, hidden, width, group), gated=False)
    assert gate_up is not None
    assert down is not None
    stored = sum(
        experts(form, 1, rows, columns, group).nbytes
        for rows, columns in ((2 * width, hidden), (hidden, width))
    )
    assert gate_up.nbytes + down.nbytes <= 1.03 * stored


def test_tiles_of_pairs() -> None:
    """Of Kimi-K2.5's experts: decode streams their weights, unless it is of so few tokens that
    streams do not fill a GPU; prefill multiplies, with one tile for nearly every expert."""
    rows = {tokens: launch(tokens, 8, 384) for tokens in (1, 4, 5, 16, 64, 256, 512, 1024, 8192)}
    assert rows == {1: 16, 4: 16, 5: 8, 16: 8, 64: 8, 256: 8, 512: 16, 1024: 32, 8192: 128}
    assert [launch(tokens, 2, 4) for tokens in (16, 17, 60, 400)] == [16, 16, 64, 128]


def test_streams() -> None:
    """Long ones where there are enough of them all the same."""
    assert streamed(columns=32, steps=28, tiles=400) == 1
    assert streamed(columns=112, steps=4, tiles=400) == 7
    assert streamed(columns=112, steps=4, tiles=128) == 3
    assert streamed(columns=64, steps=8, tiles=96) == 1  # DeepSeek-V4-Flash, 16 requests
    assert streamed(columns=112, steps=4, tiles=8) == 1
    assert streamed(columns=2, steps=1, tiles=9000) == 2


def test_permuted_columns() -> None:
    """What stands in the order of fragments is what a thread multiplies its nibbles with."""
    x = torch.arange(3 * 90).view(3, 90).float()
    out = torch.full((3, 128), -1.0)
    permute_columns[(3, 2)](x, 90, out, 128, 90, BLOCK=64)
    for row in range(3):
        for place in range(128):
            block, within = place // 32, place % 32
            mma, half, quad, one = within // 16, within // 8 % 2, within // 2 % 4, within % 2
            column = block * 32 + quad * 8 + mma * 4 + half * 2 + one
            assert out[row, place] == (row * 90 + column if column < 90 else 0)
