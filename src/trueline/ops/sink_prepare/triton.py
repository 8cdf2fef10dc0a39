"""A kernel for what is written of a token, one for its queries, and one for a rotation alone."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.rms_norm import RMSNorm
from trueline.ops.rope.triton import places
from trueline.ops.sink_prepare import IMPLEMENTATIONS, Rotation
from trueline.ops.triton_utils import inverse_rms, rotated, weighted

capabilities = IMPLEMENTATIONS["triton"]

HEADS = 4
"""Of a token, whose queries a program prepares."""
ROTATED = 16
"""Of a token, that a program only rotates."""


@triton.jit
def prepared(
    x, to, norm, cos, sin, within, eps,
    WIDTH: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, STEP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Rows [H, WIDTH] at x [H], normed by a weight, or by none; their channels from REST on are
    rotated by the angles at cos and sin. Stored at `to`, `within`."""
    i, j = tl.arange(0, REST_BLOCK), tl.arange(0, HALF_BLOCK)
    first = REST + j * STEP
    second = first + SHIFT
    rests, rotates = within[:, None] & (i < REST)[None, :], within[:, None] & (j < HALF)[None, :]
    dtype = x.dtype.element_ty
    rest = tl.load(x[:, None] + i[None, :], mask=rests, other=0.0).to(tl.float32)
    a = tl.load(x[:, None] + first[None, :], mask=rotates, other=0.0).to(tl.float32)
    b = tl.load(x[:, None] + second[None, :], mask=rotates, other=0.0).to(tl.float32)
    total = tl.sum(rest * rest, axis=1) + tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    unit = inverse_rms(total, eps, WIDTH)[:, None]
    if norm is not None:
        rest = weighted(rest * unit, tl.load(norm + i, mask=i < REST, other=0.0)[None, :], dtype)
        a = weighted(a * unit, tl.load(norm + first, mask=j < HALF, other=0.0)[None, :], dtype)
        b = weighted(b * unit, tl.load(norm + second, mask=j < HALF, other=0.0)[None, :], dtype)
    else:
        rest = (rest * unit).to(dtype)
        a, b = (a * unit).to(dtype).to(tl.float32), (b * unit).to(dtype).to(tl.float32)
    c = tl.load(cos + j, mask=j < HALF, other=0.0)[None, :]
    s = tl.load(sin + j, mask=j < HALF, other=0.0)[None, :]
    a, b = rotated(a, b, c, s)
    tl.store(to[:, None] + i[None, :], rest.to(to.dtype.element_ty), mask=rests)
    tl.store(to[:, None] + first[None, :], a.to(dtype).to(to.dtype.element_ty), mask=rotates)
    tl.store(to[:, None] + second[None, :], b.to(dtype).to(to.dtype.element_ty), mask=rotates)


@kernel
def write_rows(
    projected, latent, window, cells, q_norm, kv_norm, cos, sin, eps, row, cos_row, sin_row,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, STEP: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """A token's first program norms the latent, its second makes the row."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    x = projected + token * row
    if tl.program_id(1) == 0:
        i = tl.arange(0, RANK_BLOCK)
        given = tl.load(x + i, mask=i < RANK, other=0.0)
        numbers = given.to(tl.float32)
        unit = inverse_rms(tl.sum(numbers * numbers, axis=0), eps, RANK)
        weight = tl.load(q_norm + i, mask=i < RANK, other=0.0)
        made = weighted(numbers * unit, weight, given.dtype).to(given.dtype)
        tl.store(latent + token * RANK + i, made, mask=i < RANK)
    else:
        one = tl.zeros((1,), tl.int64)
        cell = tl.load(cells + token).to(tl.int64)
        prepared(
            x + RANK + one, window + cell * WIDTH + one, kv_norm, cos + token * cos_row,
            sin + token * sin_row, one == 0, eps, WIDTH, REST, REST_BLOCK, HALF, HALF_BLOCK, STEP,
            SHIFT,
        )  # fmt: skip


@kernel
def prepare_queries(
    q, out, cos, sin, eps, heads, q_row, q_head, cos_row, sin_row,
    WIDTH: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, STEP: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of a token."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    prepared(
        q + token * q_row + head * q_head, out + (token * heads + head) * WIDTH, None,
        cos + token * cos_row, sin + token * sin_row, head < heads, eps, WIDTH, REST, REST_BLOCK,
        HALF, HALF_BLOCK, STEP, SHIFT,
    )  # fmt: skip


@kernel
def rotate_rows(
    x, cos, sin, heads, x_row, x_head, cos_row, sin_row,
    REST: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, STEP: tl.constexpr,
    SHIFT: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Some heads of a token, where they stand."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    head, j = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF_BLOCK)
    within = (head < heads)[:, None] & (j < HALF)[None, :]
    at = x + token * x_row + head[:, None] * x_head + REST + j[None, :] * STEP
    c = tl.load(cos + token * cos_row + j, mask=j < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * sin_row + j, mask=j < HALF, other=0.0)[None, :]
    if BACK:
        s = -s
    a = tl.load(at, mask=within, other=0.0).to(tl.float32)
    b = tl.load(at + SHIFT, mask=within, other=0.0).to(tl.float32)
    a, b = rotated(a, b, c, s)
    tl.store(at, a.to(x.dtype.element_ty), mask=within)
    tl.store(at + SHIFT, b.to(x.dtype.element_ty), mask=within)


def _angles(rope: Rotation) -> tuple[Tensor, Tensor]:
    return unit_stride(rope.cos), unit_stride(rope.sin)


def _channels(width: int, rope: Rotation) -> dict[str, int]:
    half = rope.cos.shape[-1]
    step, shift = places(half, rope.pairing)
    rest = width - 2 * half
    return {
        "REST": rest,
        "HALF": half,
        "HALF_BLOCK": power_of_two(max(half, 1)),
        "STEP": step,
        "SHIFT": shift,
    }


def write(
    projected: Tensor,
    view: LatentView,
    cells: Tensor,
    *,
    norms: tuple[Tensor, Tensor],
    eps: float,
    rope: Rotation,
    rms_norm: RMSNorm,
) -> Tensor:
    assert view.layout.fp8 is None, "cache rows as they are computed"
    assert view.rows.is_contiguous()
    projected, (cos, sin) = unit_stride(projected), _angles(rope)
    n, (rank, width) = len(projected), (len(norm) for norm in norms)
    latent = projected.new_empty(n, rank)
    if n:
        channels = _channels(width, rope)
        write_rows[(n, 2)](
            *(projected, latent, view.rows, cells, *norms, cos, sin, eps),
            *(projected.stride(0), cos.stride(0), sin.stride(0)),
            RANK=rank, RANK_BLOCK=power_of_two(rank), WIDTH=width, **channels,
            REST_BLOCK=power_of_two(max(channels["REST"], 1)), num_warps=4,
        )  # fmt: skip
    return latent


def queries(q: Tensor, *, eps: float, rope: Rotation, rms_norm: RMSNorm) -> Tensor:
    q, (cos, sin) = unit_stride(q), _angles(rope)
    n, heads, width = q.shape
    out, some = q.new_empty(n, heads, width), min(HEADS, power_of_two(heads))
    if n:
        channels = _channels(width, rope)
        prepare_queries[(n, -(-heads // some))](
            *(q, out, cos, sin, eps, heads, *q.stride()[:2], cos.stride(0), sin.stride(0)),
            WIDTH=width, **channels, REST_BLOCK=power_of_two(max(channels["REST"], 1)),
            HEADS=some, num_warps=4,
        )  # fmt: skip
    return out


def rotate(x: Tensor, *, rope: Rotation, back: bool = False) -> Tensor:
    assert x.stride(-1) == 1
    cos, sin = _angles(rope)
    n, heads, width = x.shape
    some = min(ROTATED, power_of_two(heads))
    if n:
        rotate_rows[(n, -(-heads // some))](
            *(x, cos, sin, heads, *x.stride()[:2], cos.stride(0), sin.stride(0)),
            **_channels(width, rope), HEADS=some, BACK=back, num_warps=4,
        )  # fmt: skip
    return x
