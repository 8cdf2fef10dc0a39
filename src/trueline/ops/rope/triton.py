"""Some heads of a token per program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.rope import IMPLEMENTATIONS
from trueline.ops.triton_utils import rotate_into
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["triton"]

HEADS = 16
"""Of a program, at most."""


def places(half: int, pairing: Pairing) -> tuple[int, int]:
    """Channel i · step is rotated with channel i · step + shift."""
    return (2, 1) if pairing == "interleaved" else (1, half)


@kernel
def rotate_heads(
    x, cos, sin, out, heads, x_row, x_head, cos_row, sin_row,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    STEP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    head, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    within = (head < heads)[:, None] & (i < HALF)[None, :]
    c = tl.load(cos + row * cos_row + i, mask=i < HALF, other=0.0)
    s = tl.load(sin + row * sin_row + i, mask=i < HALF, other=0.0)
    at = x + row * x_row + head[:, None] * x_head + i[None, :] * STEP
    to = out + (row * heads + head[:, None]) * (2 * HALF) + i[None, :] * STEP
    rotate_into(at, to, c[None, :], s[None, :], within, SHIFT)


def run(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    x, cos, sin = unit_stride(x), unit_stride(cos), unit_stride(sin)
    (n, heads, dim), half = x.shape, cos.shape[-1]
    out, some = x.new_empty(n, heads, dim), min(HEADS, power_of_two(heads))
    step, shift = places(half, pairing)
    rotate_heads[(n, -(-heads // some))](
        *(x, cos, sin, out, heads, *x.stride()[:2], cos.stride(0), sin.stride(0)),
        HALF=half, BLOCK=power_of_two(half), HEADS=some, STEP=step, SHIFT=shift, num_warps=4,
    )  # fmt: skip
    return out
