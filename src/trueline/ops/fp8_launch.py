"""How the fp8 GEMMs for Hopper GPUs are launched (fp8_gemm.py, fp8_few.py), and activations
quantised for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from trueline.ops import fp8
from trueline.ops.codes import Codes
from trueline.ops.launch import KNOWN_MULTIPLE, num_sms, power_of_two, unit_stride
from trueline.weights.formats.block_fp8 import INPUT_GROUP as GROUP

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE = 128
"""Rows of a tile of the GEMM; scales are for as many rows and columns of the weight."""
FEW_WRITTEN = 16
"""Rows of an expert that are written together."""
QUANTISED = 2048
"""Numbers that a program quantises."""
FEW_ROWS = 64
"""That the kernel for few rows takes together."""
MOST_FEW = 128
"""Rows for which that is faster than the GEMM."""
ROW_TILES = 4
"""Of one tile of the weight that the kernel for few rows may split the depth for."""
MOST_PARTS = 8
INSIDE_ROWS, INSIDE_STEPS = 16, 8
"""Up to which the kernel for few rows quantises them itself, by scales that are powers of two."""
SMALL_WEIGHT = 16 << 20
"""Numbers of one that few rows share in smaller tiles."""
CODES = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations: codes [rows, depth], and scales [depth / 128, rows], rounded up."""

    codes: Tensor
    scales: Tensor
    count: int
    """Of rows; there is room for more."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A token's pairs, sorted by expert into whole tiles."""

    ids: Tensor
    order: Tensor
    """The pair of each row; behind an expert's last one, a number that no pair has."""
    tiles: Tensor
    """The expert of each tile of rows."""
    total: Tensor
    """[1]: how many tiles there are."""
    places: Tensor
    """The row of each pair."""
    held: tuple[int, int]
    """The first routed expert here, and how many."""
    top: int
    shared: int

    @property
    def choices(self) -> dict[str, int]:
        return {"TOP": self.top, "SHARED": self.shared}

    @property
    def pairs(self) -> int:
        return len(self.places)


def fits(codes: Codes) -> bool:
    """Whether the kernels take the weight's blocks, and rows that TMA can copy."""
    matrices, rows, columns = codes.numbers.shape
    whole = matrices == 1 or rows % TILE == 0
    blocks = codes.rows_per_scale, codes.group
    return codes.form == "fp8" and blocks == (TILE, TILE) and whole and not columns % KNOWN_MULTIPLE


def room(rows: int, depth: int, like: Tensor) -> Fp8Rows:
    whole = max(triton.cdiv(rows, TILE), 1) * TILE
    scales = like.new_empty(triton.cdiv(depth, GROUP), whole, dtype=torch.float32)
    return Fp8Rows(like.new_empty(whole, depth, dtype=CODES), scales, rows)


def quantised(
    x: Tensor,
    *,
    powers: bool,
    gated: bool = False,
    limit: float | None = None,
    placed: Placed | None = None,
) -> Fp8Rows:
    """x's rows, or those of each token's pairs where they are placed; gated: silu × up, within a
    limit."""
    x = unit_stride(x)
    depth = x.shape[1] // (2 if gated else 1)
    made = room(len(x) if placed is None else len(placed.order), depth, x)
    fp8.quantise[(len(x), triton.cdiv(depth, QUANTISED))](
        *(x, x.stride(0), made.codes, made.scales, made.scales.shape[1], depth),
        *((x, x, 0, 0) if placed is None else (placed.ids, placed.places, *placed.held)),
        **({"TOP": 1, "SHARED": 0} if placed is None else placed.choices),
        PLACED=placed is not None, GATED=gated, LIMIT=limit, POWERS=powers, BLOCK=QUANTISED,
        GROUP=GROUP, num_warps=8,
    )  # fmt: skip
    return made


def through_fp8(x: Tensor, *, powers: bool) -> Tensor:
    """x as the product of its codes and scales, in float32: 16 bits would round it once more."""
    x = unit_stride(x)
    depth = x.shape[1]
    out = x.new_empty(len(x), depth, dtype=torch.float32)
    fp8.through_fp8[(len(x), triton.cdiv(depth, QUANTISED))](
        *(x, x.stride(0), out, depth), POWERS=powers, BLOCK=QUANTISED, GROUP=GROUP, num_warps=8
    )
    return out


def combine(parts: Tensor, weights: Tensor, placed: Placed, out: Tensor, block: int) -> None:
    hidden = out.shape[1]
    fp8.combine[(len(out), triton.cdiv(hidden, block))](
        *(parts, placed.ids, weights, placed.places, out, *placed.held, hidden),
        **placed.choices,
        BLOCK=block,
    )


def _described(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    from triton.experimental.gluon import language as gl  # Gluon is not everywhere
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 8 * x.itemsize, 2)
    return TensorDescriptor.from_tensor(x, list(box), layout)


def _numbers(weight: Codes) -> Tensor:
    return weight.numbers.view(CODES).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    halves: int
    stages: int
    group: int
    """Row tiles that go over the columns together."""


def gemm_launch(rows: int, width: int, *, grouped: bool, gated: bool, sms: int) -> GemmLaunch:
    """As measured on an H200. rows: of experts, of one on average."""
    tiles = triton.cdiv(rows, TILE)
    if grouped:
        return GemmLaunch(2, 4, 2 if tiles > 1 else 1)
    group = next(each for each in (4, 2, 1) if tiles % each == 0 or tiles >= 8 * each)
    if gated or 5 * tiles * triton.cdiv(width, 2 * TILE) >= 4 * sms:
        return GemmLaunch(2, 4, group)
    return GemmLaunch(1, 6, group)


def gemm(
    x: Fp8Rows,
    weight: Codes,
    *,
    gated: bool,
    powers: bool,
    dtype: torch.dtype,
    limit: float | None = None,
    placed: Placed | None = None,
    how: GemmLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """x × its weight, or its experts'; and, gated, the scales of what is then fp8."""
    from trueline.ops import fp8_gemm  # Gluon is not everywhere

    experts, width, _ = weight.numbers.shape
    width //= 2 if gated else 1
    device = x.codes.device
    # rows begin where TMA can write them
    stride = triton.cdiv(width, KNOWN_MULTIPLE) * KNOWN_MULTIPLE
    out = x.codes.new_empty(len(x.codes), stride, dtype=CODES if gated else dtype)[:, :width]
    groups = triton.cdiv(width, GROUP) if gated else 1
    scales = x.scales.new_empty(groups, len(x.codes))
    grouped = placed is not None
    if how is None:
        rows = x.count if placed is None else placed.pairs // experts
        how = gemm_launch(rows, width, grouped=grouped, gated=gated, sms=num_sms(device))
    fp8_gemm.gemm[(num_sms(device),)](
        _described(x.codes, (TILE // 2 if grouped else TILE, TILE)),
        _described(_numbers(weight), (TILE, TILE)),
        *(x.scales, x.scales.shape[1], weight.scales),
        *((x.scales, x.scales) if placed is None else (placed.tiles, placed.order)),
        x.count if placed is None else placed.pairs,
        x.scales if placed is None else placed.total,
        _described(out, (FEW_WRITTEN if grouped else TILE // 2, TILE)),
        *(scales, scales.shape[1], weight.columns, width),
        GATED=gated, LIMIT=limit, POWERS=powers, GROUPED=grouped, GROUP=how.group,
        HALVES=how.halves, STAGES=how.stages,
    )  # fmt: skip
    return out, scales


@dataclass(frozen=True, slots=True)
class FewLaunch:
    rows: int
    """Of x, that a program has."""
    parts: int
    """That the depth is split into."""
    stages: int


def few_launch(rows: int, width: int, depth: int, sms: int) -> FewLaunch:
    """As measured on an H200: about as many programs as run at a time, if each has work."""
    most = FEW_ROWS // 2 if width * depth <= SMALL_WEIGHT else FEW_ROWS
    together = min(max(power_of_two(rows), 8), most)
    row_tiles = triton.cdiv(rows, together)
    tiles = triton.cdiv(width, TILE) * row_tiles
    least = (16 if together > 16 else 8) * TILE
    parts = 1
    while row_tiles <= ROW_TILES and parts < MOST_PARTS and tiles * parts < sms:
        if depth < least * parts:
            break
        parts *= 2
    return FewLaunch(together, parts, 4 if together < FEW_ROWS else 3)


def takes_few(rows: int, weight: Codes) -> bool:
    """Whether that is faster than the GEMM: up to FEW_ROWS; up to twice as many where the GEMM has
    too few tiles for the GPU."""
    tiles = triton.cdiv(weight.numbers.shape[1], TILE)
    return rows <= FEW_ROWS or (rows <= MOST_FEW and tiles < num_sms(weight.numbers.device))


def arrivals(weight: Codes) -> Tensor:
    """Zeros, one for each tile that `few` may have of this weight."""
    tiles = triton.cdiv(weight.numbers.shape[1], TILE) * ROW_TILES
    return torch.zeros(tiles, dtype=torch.int32, device=weight.numbers.device)


def few(
    x: Fp8Rows | Tensor,
    weight: Codes,
    arrived: Tensor,
    dtype: torch.dtype,
    how: FewLaunch | None = None,
) -> Tensor:
    """Few rows, quantised or not; of more, some at a time, each time with all of the weight."""
    from trueline.ops import fp8_few  # Gluon is not everywhere

    rows = len(x) if isinstance(x, Tensor) else x.count
    (_, width, _), depth = weight.numbers.shape, weight.columns
    how = how or few_launch(rows, width, depth, num_sms(weight.numbers.device))
    out = weight.scales.new_empty(rows, width, dtype=dtype)
    parts = out
    if how.parts > 1:
        parts = weight.scales.new_empty(how.parts, rows, width, dtype=torch.float32)
    grid = triton.cdiv(width, TILE), how.parts, triton.cdiv(rows, how.rows)
    described = _described(_numbers(weight), (TILE, TILE))
    left, sizes = (out, parts, arrived), (rows, depth, width)
    choices = {"T": how.rows, "SPLIT": how.parts, "STAGES": how.stages}
    steps = triton.cdiv(triton.cdiv(depth, GROUP), how.parts)
    if isinstance(x, Tensor):
        few_steps = how.rows <= INSIDE_ROWS and steps <= INSIDE_STEPS
        if weight.powers_of_two and few_steps:
            x = unit_stride(x)
            fp8_few.few_numbers[grid](
                described, x, x.stride(0), weight.scales, *left, *sizes,
                **choices, STEPS=steps,
            )  # fmt: skip
            return out
        x = quantised(x, powers=weight.powers_of_two)
    fp8_few.few[grid](
        described, _described(x.codes, (how.rows, TILE)),
        *(weight.scales, x.scales, x.scales.shape[1], *left, *sizes),
        **choices,
    )  # fmt: skip
    return out
