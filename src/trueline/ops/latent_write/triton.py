"""One kernel: the first program of a token norms, rotates and stores its cache row, the others
rotate its queries."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.latent_pointers import latent_places, latent_pointers
from trueline.ops.latent_write import IMPLEMENTATIONS, Parts
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.rope.triton import HEADS, places
from trueline.ops.triton_utils import fp8_scale, inverse_rms, rotate_into, weighted
from trueline.spec.rope import Pairing

capabilities = IMPLEMENTATIONS["triton"]


@kernel
def write_token(
    latent, key, queries, rows, scales, keys, cells, norm, cos, sin, out, heads, eps,
    latent_row, key_row, queries_row, queries_head, cos_row, sin_row,
    ROW: tl.constexpr, KEY_ROW: tl.constexpr, KEY_AT: tl.constexpr, SCALE_ROW: tl.constexpr,
    SCALE_AT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LATENT: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, STEP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, HALF_BLOCK)
    c = tl.load(cos + token * cos_row + j, mask=j < HALF, other=0.0)
    s = tl.load(sin + token * sin_row + j, mask=j < HALF, other=0.0)
    if part == 0:
        i = tl.arange(0, BLOCK)
        cell = tl.load(cells + token).to(tl.int64)
        scale = tl.load(norm + i, mask=i < LATENT, other=0.0)
        given = tl.load(latent + token * latent_row + i, mask=i < LATENT, other=0.0)
        at, to = key + token * key_row + j * STEP, keys + cell * KEY_ROW + KEY_AT + j * STEP
        rotate_into(at, to, c, s, j < HALF, SHIFT)
        numbers = given.to(tl.float32)
        unit = inverse_rms(tl.sum(numbers * numbers, axis=0), eps, LATENT)
        made = weighted(numbers * unit, scale, given.dtype)
        if scales is not None:
            each = tl.full([BLOCK], 1.0, tl.float32)
            for group in range((LATENT + GROUP - 1) // GROUP):
                mine = (i // GROUP == group) & (i < LATENT)
                shared = fp8_scale(made, mine, LARGEST, POWER_OF_TWO)
                tl.store(scales + cell * SCALE_ROW + SCALE_AT + group, shared)
                each = tl.where(mine, shared, each)
            made = tl.div_rn(made, each)
        tl.store(rows + cell * ROW + i, made.to(rows.dtype.element_ty), mask=i < LATENT)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        within = (head < heads)[:, None] & (j < HALF)[None, :]
        of = queries + token * queries_row + head[:, None] * queries_head + j[None, :] * STEP
        into = out + (token * heads + head[:, None]) * (LATENT + 2 * HALF) + LATENT
        rotate_into(of, into + j[None, :] * STEP, c[None, :], s[None, :], within, SHIFT)


def run(
    latent: Tensor,
    key: Tensor,
    queries: Tensor,
    view: LatentView,
    cells: Tensor,
    *,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    parts: Parts,
) -> Tensor:
    latent, key, queries = unit_stride(latent), unit_stride(key), unit_stride(queries)
    cos, sin = unit_stride(cos), unit_stride(sin)
    (n, heads, _), width, half = queries.shape, latent.shape[1], cos.shape[-1]
    wide = queries.new_empty(n, heads, view.layout.width)
    some = min(HEADS, power_of_two(heads))
    step, shift = places(half, pairing)
    fp8 = view.layout.fp8
    write_token[(n, 1 + -(-heads // some))](
        *(latent, key, queries, *latent_pointers(view), cells, norm, cos, sin, wide, heads, eps),
        *(latent.stride(0), key.stride(0), *queries.stride()[:2], cos.stride(0), sin.stride(0)),
        **latent_places(view),
        LARGEST=fp8.variant.largest if fp8 else 1.0, POWER_OF_TWO=bool(fp8 and fp8.power_of_two),
        LATENT=width, BLOCK=power_of_two(width), HALF=half, HALF_BLOCK=power_of_two(half),
        HEADS=some, STEP=step, SHIFT=shift, num_warps=4,
    )  # fmt: skip
    return wide
