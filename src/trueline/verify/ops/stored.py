"""Weights as they are stored, for every implementation that packs them: needles in single codes,
scales over twelve powers of two, groups of zeros, −0 and the largest codes, blocks and groups that
end inside, and cuts between them and within. Numbers may be rounded to the dtype of computation,
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trueline.ops.batched_gemm import BatchedGemm
from trueline.ops.capabilities import Capabilities, Opaque
from trueline.ops.experts import Experts
from trueline.ops.experts import reference as experts_reference
from trueline.ops.linear import LinearOp
from trueline.spec.source import Span
from trueline.verify import bounds
from trueline.verify.ops.basic import experts_bound
from trueline.verify.ops.data import randn, require, torch_linear, within
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.fp4 import Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored
from trueline.weights.value import StoredPart, Weight

Quantised = Fp8Stored | Int4Stored | Fp4Stored
POWERS = 12
BLOCK = (24, 32)
"""Of fp8: divides none of the shapes."""
LIMIT = 0.05
"""That many of these gates and ups are beyond."""


def _draw(low: int, high: int, *shape: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    made = torch.randint(low, high, shape, generator=draw, device="cpu")
    return made.to(torch.get_default_device())


def _codes(rows: int, columns: int, zero: int, count: int, seed: int) -> Tensor:
    """[rows, columns]: all codes, but zeros in the first groups of a few rows; and of every third
    row a single one that is not zero."""
    codes = _draw(0, count, rows, columns, seed=seed)
    codes[: rows // 8, :128] = zero
    at = _draw(0, columns, rows, 1, seed=seed + 1)
    alone = torch.arange(columns)[None, :] == at
    needle = torch.where(codes == zero, zero + 1, codes)
    third = (torch.arange(rows) % 3 == 1)[:, None]
    return torch.where(third, torch.where(alone, needle, zero), codes)


def fp8(
    rows: int, columns: int, group: int, seed: int, block: tuple[int, int] = BLOCK
) -> Fp8Stored:
    codes = _codes(rows, columns, 0, 256, seed).to(torch.uint8)
    codes[codes & 127 == 127] = 128  # no NaN; −0 instead
    blocks = -(-rows // block[0]), -(-columns // block[1])
    scales = 1.3 * torch.exp2(_draw(-8 - POWERS, -8, *blocks, seed=seed + 2).float())
    return Fp8Stored(codes.view(torch.float8_e4m3fn), scales, block)


def int4(rows: int, columns: int, group: int, seed: int) -> Int4Stored:
    codes = _codes(rows, columns, 8, 16, seed)
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        words |= codes[:, place::8] << 4 * place
    packed = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    groups = rows, -(-columns // group)
    scales = 1.3 * torch.exp2(_draw(-2 - POWERS, -2, *groups, seed=seed + 2).float())
    return Int4Stored(packed, scales.bfloat16(), group, columns)


def fp4(rows: int, columns: int, group: int, seed: int) -> Fp4Stored:
    codes = _codes(rows, columns, 0, 16, seed).to(torch.uint8)
    groups = rows, -(-columns // 32)
    scales = _draw(126 - POWERS, 126, *groups, seed=seed + 2).to(torch.uint8)
    return Fp4Stored(codes[:, 0::2] | codes[:, 1::2] << 4, scales, columns)


MAKERS: dict[str, Callable[[int, int, int, int], Quantised]] = {
    "block fp8": fp8,
    "int4": int4,
    "fp4": fp4,
}


def stack(
    label: str,
    shape: tuple[int, int, int],
    group: int,
    halves: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Weight:
    """Of each matrix, `halves` parts of equally many rows. dtype: of what is dequantised."""
    count, rows, columns = shape
    parts = tuple(
        StoredPart(
            MAKERS[label](rows // halves, columns, group, seed + 100 * matrix + 10 * half),
            label,
            (matrix, half * (rows // halves), 0),
        )
        for matrix in range(count)
        for half in range(halves)
    )
    home = torch.get_default_device()
    return Weight(shape, dtype, parts, home, home)


def batched_gemm(op: BatchedGemm[Opaque], dtype: torch.dtype = torch.float32) -> None:
    """Heads under each other in one stored matrix, of which a rank has some: whole published
    blocks, and others."""
    for block, heads, out, inner in (((128, 128), 2, 256, 1280), (BLOCK, 3, 40, 64)):
        stored = fp8((heads + 1) * out, inner, 0, 7, block)
        matrix = Weight(stored.shape, dtype, (StoredPart(stored, "block fp8", (0, 0)),))
        matrix = replace(matrix, home=stored.numbers.device, device=stored.numbers.device)
        weight = matrix.cut(0, Span(out, (heads + 1) * out, (heads + 1) * out)).stacked(heads)
        numbers = weight.dequantise(torch.float32)
        packed = op.pack(weight, torch_linear(), False)
        for rows in (1, 5, 70, 300):
            x = (randn(rows, heads, inner + 16, seed=8) / 16).to(dtype)[..., :inner]
            exact = (x.double().transpose(0, 1) @ numbers.double().mT).transpose(0, 1)
            off = bounds.gemm(x.transpose(0, 1), numbers, dtype, rounded=dtype).transpose(0, 1)
            off = off + bounds.stored(exact, dtype)
            what = f"batched_gemm of block fp8, {heads} × {out} × {inner}, {rows} rows"
            for turn in ("", ", again"):
                within(what + turn, op.run(x, packed), exact, off)


def _labels(declared: Capabilities) -> Iterator[tuple[str, int]]:
    """And the columns of a scale, where that is not fixed."""
    for label in declared.formats or tuple(MAKERS):
        yield label, 32
        if label == "int4":
            yield label, 128


def experts(op: Experts[Opaque], dtype: torch.dtype = torch.float32) -> None:
    E, K, first = 3, 2, 2
    for label, group in _labels(op.capabilities):
        for hidden, width, cut in ((256, 64, 0), (288, 96, 32), (320, 72, 8)):
            total = 128 * -(-(width + cut) // 128)  # of which this rank has `width`
            both = stack(label, (E, 2 * total, hidden), group, 2, 1, dtype)
            spans = (Span(at + cut, at + cut + width, 2 * total) for at in (0, total))
            gate_up = Weight.concat([both.cut(1, span) for span in spans], 1)
            wider = stack(label, (E, hidden, total), group, 1, 2, dtype)
            down = wider.cut(2, Span(cut, cut + width, total))
            limit = None if cut else LIMIT
            packed = op.pack(gate_up, down, torch_linear(), limit)
            numbers = gate_up.dequantise(torch.float32), down.dequantise(torch.float32)
            exact_of = experts_reference.pack(*numbers, None, limit)
            for tokens in (2, 17, 90)[: 2 if cut else 3]:
                x = (randn(tokens, hidden, seed=3) / 16).to(dtype)
                weights = randn(tokens, K, seed=4).abs() * 2.5
                ids = randn(tokens, E + 1, seed=5).argsort(1)[:, :K] + first
                exact = experts_reference.run(
                    x.double(), ids, weights.double(), exact_of, None, first
                )
                off = experts_bound(x, ids - first, weights, *numbers, rounded=dtype, limit=limit)
                off += bounds.stored(exact, dtype)
                ours = op.run(x, ids, weights, packed, torch_linear(), first)
                what = f"experts in {label}, groups of {group}, {hidden} × {width}, {tokens} tokens"
                require(bool(ours.isfinite().all()), f"{what}: not finite")
                within(what, ours, exact, off)


def linear(op: LinearOp, dtype: torch.dtype = torch.float32) -> None:
    for label, group in _labels(op.capabilities):
        for rows, columns, cut in ((40, 256, 0), (33, 352, 32), (130, 190, 8)):
            total = 128 * -(-(columns + cut) // 128)
            (wider,) = stack(label, (1, rows, total), group, 1, 6, dtype).unstack()
            weight = wider.cut(1, Span(cut, cut + columns, total))
            packed, numbers = op.pack(weight), weight.dequantise(torch.float32).double()
            for tokens in (1, 5, 70):
                x = (randn(tokens, columns, seed=7) / 16).to(dtype)
                exact = x.double() @ numbers.mT
                off = bounds.gemm(x, numbers, dtype, rounded=dtype)
                what = f"linear in {label}, groups of {group}, {rows} × {columns}, {tokens} rows"
                within(what, op.run(x, packed), exact, off + bounds.stored(exact, dtype))
                within(f"{what}, float32", op.run_wide(x, packed), exact, off)
