"""Some heads of a token per program: silu, norm and rotation in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.latent_write import Parts
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.qkv_prepare import IMPLEMENTATIONS
from trueline.ops.rope.triton import places
from trueline.ops.triton_utils import inverse_rms, rotated, weighted
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["triton"]

HEADS = 8
"""Of a program, at most."""


@triton.jit
def load(x, within, SILU: tl.constexpr):
    given = tl.load(x, mask=within, other=0.0)
    numbers = given.to(tl.float32)
    if SILU:
        numbers = (numbers * tl.sigmoid(numbers)).to(given.dtype).to(tl.float32)
    return numbers


@kernel
def prepare_heads(
    qkv, out, q_norm, k_norm, cos, sin, eps, heads, qkv_row, cos_row, sin_row,
    D: tl.constexpr, REST_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, STEP: tl.constexpr, SHIFT: tl.constexpr,
    SILU: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Channels that are rotated come in two halves, a and b; the rest stays. Values are neither
    normed nor rotated."""
    pdl_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    i, j = 2 * HALF + tl.arange(0, REST_BLOCK), tl.arange(0, HALF_BLOCK)
    has_rest = (head < heads)[:, None] & (i < D)[None, :]
    rotates = (head < heads)[:, None] & (j < HALF)[None, :]
    at = qkv + token * qkv_row + (part * heads + head)[:, None] * D
    row = part * tl.num_programs(0).to(tl.int64) + token
    to = out + (row * heads + head[:, None]) * D
    rest = load(at + i[None, :], has_rest, SILU)
    a = load(at + j[None, :] * STEP, rotates, SILU)
    b = load(at + j[None, :] * STEP + SHIFT, rotates, SILU)
    dtype = qkv.dtype.element_ty
    if NORM:
        norm = q_norm
        if part == 1:
            norm = k_norm
        normed = part < 2
        total = tl.sum(rest * rest, axis=1) + tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        unit = tl.where(normed, inverse_rms(total, eps, D), 1.0)[:, None]
        rest = weighted(rest * unit, weights(norm, i, i < D, normed), dtype)
        a = weighted(a * unit, weights(norm, j * STEP, j < HALF, normed), dtype)
        b = weighted(b * unit, weights(norm, j * STEP + SHIFT, j < HALF, normed), dtype)
    tl.store(to + i[None, :], rest.to(dtype), mask=has_rest)
    if HALF > 0:
        c = tl.load(cos + token * cos_row + j, mask=(j < HALF) & (part < 2), other=1.0)
        s = tl.load(sin + token * sin_row + j, mask=(j < HALF) & (part < 2), other=0.0)
        a, b = rotated(a, b, c[None, :], s[None, :])
        tl.store(to + j[None, :] * STEP, a.to(dtype), mask=rotates)
        tl.store(to + j[None, :] * STEP + SHIFT, b.to(dtype), mask=rotates)


@triton.jit
def weights(norm, channels, within, normed):
    return tl.load(norm + channels, mask=within & normed, other=1.0)[None, :]


def run(
    qkv: Tensor,
    *,
    heads: int,
    silu: bool,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rope: tuple[Tensor, Tensor, Pairing] | None,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = unit_stride(qkv)
    n, d = len(qkv), qkv.shape[1] // (3 * heads)
    # any pointer will do for what is not there
    q_norm, k_norm = norms or (qkv, qkv)
    cos, sin, pairing = rope or (qkv, qkv, "half-split")
    cos, sin, half = unit_stride(cos), unit_stride(sin), cos.shape[-1] if rope else 0
    step, shift = places(half, pairing)
    some, made = min(HEADS, power_of_two(heads)), 3 if silu else 2
    out = qkv.new_empty(made, n, heads, d)
    prepare_heads[(n, made, -(-heads // some))](
        *(qkv, out, q_norm, k_norm, cos, sin, eps, heads),
        *(qkv.stride(0), cos.stride(0), sin.stride(0)),
        D=d, REST_BLOCK=power_of_two(d - 2 * half), HALF=half, HALF_BLOCK=power_of_two(half),
        HEADS=some, STEP=step, SHIFT=shift, SILU=silu, NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    v = out[2] if silu else qkv[:, 2 * heads * d :].unflatten(1, (heads, d))
    return out[0], out[1], v
