# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Few tokens: the GEMM is split over the channels of the streams, so that a step of one token fills
the GPU, and each program of what follows adds up the parts again. STREAMS are padded to a power of
two in registers, never in memory."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import inverse_rms


@kernel(do_not_specialize=["tokens"])
def project(
    h, fn, out, tokens, width, depth,
    MADE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [splits, tokens, MADE + 1]: fn · h over `depth` of the `width` channels of a token's
    streams; and, last, the sum of their squares."""
    pdl_wait()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, inner = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    start = tl.program_id(1) * depth
    stop = tl.minimum(start + depth, width)
    at = h + m.to(tl.int64)[:, None] * width + inner[None, :]
    fn_at = fn + n[:, None] * width + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in range(start, stop, BLOCK_K):
        inside = (inner < stop - k)[None, :]
        a = tl.load(at + k, mask=(m < tokens)[:, None] & inside, other=0).to(tl.float32)
        b = tl.load(fn_at + k, mask=(n < MADE)[:, None] & inside, other=0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        squares += tl.sum(a * a, axis=1)
    out += (tl.program_id(1).to(tl.int64) * tokens + m)[:, None] * (MADE + 1)
    live = (m < tokens)[:, None]
    tl.store(out + n[None, :], acc, mask=live & (n < MADE)[None, :])
    tl.store(out + MADE + tl.arange(0, 1)[None, :], squares[:, None], mask=live)


@triton.jit
def _total(parts, place, inside, step, SPLITS: tl.constexpr):
    """The sum over splits of what is at `place`."""
    made = tl.load(parts + place, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        made += tl.load(parts + split * step + place, mask=inside, other=0.0)
    return made


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _sinkhorn(carry, s, eps, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr):
    """Of logits [PADDED, PADDED], of which STREAMS × STREAMS are real; the others become zeros."""
    live = s < STREAMS
    real = live[:, None] & live[None, :]
    carry = tl.where(real, carry, float("-inf"))
    carry = tl.where(real, tl.exp(carry - tl.max(carry, axis=1)[:, None]), 0.0)
    carry = carry / tl.where(live, tl.sum(carry, axis=1), 1.0)[:, None]
    carry = tl.where(real, carry + eps, 0.0)
    carry = carry / tl.where(live, tl.sum(carry, axis=0) + eps, 1.0)[None, :]
    for _ in range(ITERATIONS - 1):
        carry = carry / tl.where(live, tl.sum(carry, axis=1) + eps, 1.0)[:, None]
        carry = carry / tl.where(live, tl.sum(carry, axis=0) + eps, 1.0)[None, :]
    return carry


@kernel(do_not_specialize=["tokens"])
def read(
    h, parts, base, scale, x, post, carry, tokens, norm_eps, eps,
    WIDTH: tl.constexpr, STREAMS: tl.constexpr, PADDED: tl.constexpr, MADE: tl.constexpr,
    SPLITS: tl.constexpr, ITERATIONS: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [tokens, WIDTH] = Σ pre h; a program has BLOCK channels of a token, and the first of a
    token's makes post and carry too, where there is what to MIX."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PADDED)
    step = tokens * (MADE + 1)
    parts += token * (MADE + 1)
    squares = _total(parts, MADE, True, step, SPLITS)
    unit = inverse_rms(squares, norm_eps, STREAMS * WIDTH)
    m = _total(parts, s, s < STREAMS, step, SPLITS) * unit
    pre = _sigmoid(m * tl.load(scale) + tl.load(base + s, mask=s < STREAMS, other=0.0)) + eps
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (s < STREAMS)[:, None] & (column < WIDTH)[None, :]
    at = h + (token * STREAMS + s)[:, None] * WIDTH + column[None, :]
    streams = tl.load(at, mask=inside, other=0).to(tl.float32)
    y = tl.sum(pre[:, None] * streams, axis=0)
    tl.store(x + token * WIDTH + column, y.to(x.dtype.element_ty), mask=column < WIDTH)
    if MIX and tl.program_id(1) == 0:
        to_post = _total(parts, STREAMS + s, s < STREAMS, step, SPLITS) * unit
        to_post *= tl.load(scale + 1)
        to_post += tl.load(base + STREAMS + s, mask=s < STREAMS, other=0.0)
        tl.store(post + token * STREAMS + s, 2 * _sigmoid(to_post), mask=s < STREAMS)
        square = s[:, None] * STREAMS + s[None, :]
        real = (s < STREAMS)[:, None] & (s < STREAMS)[None, :]
        place = 2 * STREAMS + square
        logits = _total(parts, place, real, step, SPLITS) * unit
        logits = logits * tl.load(scale + 2) + tl.load(base + place, mask=real, other=0.0)
        made = _sinkhorn(logits, s, eps, STREAMS, ITERATIONS)
        tl.store(carry + token * STREAMS * STREAMS + square, made, mask=real)


@kernel
def merge(
    h, y, post, carry, out, width,
    STREAMS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [tokens, STREAMS, width]: stream k is post_k y + Σ_j carry[j, k] h_j."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PADDED)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    given = tl.load(y + token * width + column, mask=within, other=0).to(tl.float32)
    factor = tl.load(post + token * STREAMS + s, mask=s < STREAMS, other=0.0)
    acc = factor[:, None] * given[None, :]
    for source in tl.static_range(STREAMS):
        at = token * STREAMS + source
        stream = tl.load(h + at * width + column, mask=within, other=0).to(tl.float32)
        factor = tl.load(carry + at * STREAMS + s, mask=s < STREAMS, other=0.0)
        acc += factor[:, None] * stream[None, :]
    to = out + (token * STREAMS + s)[:, None] * width + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(s < STREAMS)[:, None] & within[None, :])
