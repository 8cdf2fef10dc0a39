# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 (Triton knows no unpacking)
"""Two kernels for what stands between two sub-layers: the streams take an output and go through a
small GEMM; then everything that needs a token's whole sums. The GEMM is split over the channels, so
that a step of one token fills the GPU. What a token has few of (streams, and pairs of them) are
tuples of registers: a reduction over so few would cost more than it adds."""

from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.triton_utils import inverse_rms, weighted

_TF32_HALF = tl.constexpr(1 << 12)
_TF32_BITS = tl.constexpr(-1 << 13)


@kernel(do_not_specialize=["tokens"])
def project(
    h, y, post, carry, fn, merged, parts, tokens, depth,
    WIDTH: tl.constexpr, STREAMS: tl.constexpr, MADE: tl.constexpr, MERGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts [splits, tokens, MADE + 1]: fn · h over `depth` of the WIDTH channels of every stream;
    and, last, the sum of their squares. MERGE: of the streams after they took y, which go to
    `merged`."""
    pdl_wait()
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n, inner = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    live = m < tokens
    if MERGE:
        taken = ()
        kept = ()
        for k in tl.static_range(STREAMS):
            factor = tl.load(post + m * STREAMS + k, mask=live, other=0.0)
            taken = taken + (factor[:, None],)
            for j in tl.static_range(STREAMS):
                place = (m * STREAMS + j) * STREAMS + k
                factor = tl.load(carry + place, mask=live, other=0.0)
                kept = kept + (factor[:, None],)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    start = tl.program_id(1) * depth
    for first in range(start, tl.minimum(start + depth, WIDTH), BLOCK_K):
        column = first + inner
        within = (column < WIDTH)[None, :]
        inside = live[:, None] & within
        channel = m[:, None] * (STREAMS * WIDTH) + column[None, :]
        streams = ()
        for j in tl.static_range(STREAMS):
            streams = streams + (tl.load(h + channel + j * WIDTH, mask=inside, other=0),)
        if MERGE:
            given = tl.load(y + m[:, None] * WIDTH + column[None, :], mask=inside, other=0)
            before = streams
            streams = ()
            for k in tl.static_range(STREAMS):
                new = taken[k] * given.to(tl.float32)
                for j in tl.static_range(STREAMS):
                    new += kept[k * STREAMS + j] * before[j].to(tl.float32)
                streams = streams + (new.to(merged.dtype.element_ty),)
                tl.store(merged + channel + k * WIDTH, streams[k], mask=inside)
        for j in tl.static_range(STREAMS):
            at = fn + n[:, None] * (STREAMS * WIDTH) + j * WIDTH + column[None, :]
            b = tl.load(at, mask=(n < MADE)[:, None] & within, other=0.0)
            a = streams[j].to(tl.float32)
            acc = _dot(a, b, acc, h.dtype.element_ty == tl.float32)
            squares += a * a
    parts += (tl.program_id(1).to(tl.int64) * tokens + m)[:, None] * (MADE + 1)
    tl.store(parts + n[None, :], acc, mask=live[:, None] & (n < MADE)[None, :])
    total = tl.sum(squares, axis=1)[:, None]
    tl.store(parts + MADE + tl.arange(0, 1)[None, :], total, mask=live[:, None])


@triton.jit
def _dot(a, b, acc, IEEE: tl.constexpr):
    """a · bᵀ + acc. Numbers of 16 bits are tf32's too: with b in two of those, tensor cores give
    all but the last of float32's digits."""
    if IEEE:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    bits = b.to(tl.int32, bitcast=True)
    high = ((bits + _TF32_HALF) & _TF32_BITS).to(tl.float32, bitcast=True)
    acc = tl.dot(a, tl.trans(b - high), acc, input_precision="tf32")
    return tl.dot(a, tl.trans(high), acc, input_precision="tf32")


@triton.jit
def _sums(
    parts, token, tokens, splits, norm_eps,
    CHANNELS: tl.constexpr, MADE: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """fn · flat(h) / rms(flat(h)) of a token, [COLUMNS]."""
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    at = (split.to(tl.int64) * tokens + token)[:, None] * (MADE + 1) + column[None, :]
    inside = (split < splits)[:, None] & (column <= MADE)[None, :]
    made = tl.sum(tl.load(parts + at, mask=inside, other=0.0), axis=0)
    return made * inverse_rms(_one(made, MADE, COLUMNS), norm_eps, CHANNELS)


@triton.jit
def _one(made, i, COLUMNS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, COLUMNS) == i, made, 0.0), axis=0)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _sinkhorn(c, eps, S: tl.constexpr, ITERATIONS: tl.constexpr):
    """Of logits [S × S], a tuple. The matrix stays; what its rows and columns were divided by so
    far is kept beside it: a third of the operations, which every warp of a program repeats."""
    made = ()
    for j in tl.static_range(S):
        most = c[j * S]
        for k in tl.static_range(1, S):
            most = tl.maximum(most, c[j * S + k])
        total = 0.0
        row = ()
        for k in tl.static_range(S):
            row = row + (tl.exp(c[j * S + k] - most),)
            total += row[k]
        for k in tl.static_range(S):
            made = made + (row[k] / total + eps,)
    rows = ()
    columns = ()
    for _ in tl.static_range(S):
        rows = rows + (1.0,)
        columns = columns + (1.0,)
    columns = _over_columns(made, rows, columns, eps, S)
    for _ in range(ITERATIONS - 1):
        rows = _over_rows(made, rows, columns, eps, S)
        columns = _over_columns(made, rows, columns, eps, S)
    scaled = ()
    for i in tl.static_range(S * S):
        scaled = scaled + (made[i] * rows[i // S] * columns[i % S],)
    return scaled


@triton.jit
def _over_rows(c, rows, columns, eps, S: tl.constexpr):
    made = ()
    for j in tl.static_range(S):
        total = c[j * S] * columns[0]
        for k in tl.static_range(1, S):
            total += c[j * S + k] * columns[k]
        made = made + (rows[j] / (total * rows[j] + eps),)
    return made


@triton.jit
def _over_columns(c, rows, columns, eps, S: tl.constexpr):
    made = ()
    for k in tl.static_range(S):
        total = c[k] * rows[0]
        for j in tl.static_range(1, S):
            total += c[j * S + k] * rows[j]
        made = made + (columns[k] / (total * columns[k] + eps),)
    return made


@kernel(do_not_specialize=["tokens", "splits"])
def read(
    h, parts, base, scale, weight, x, post, carry, tokens, splits, norm_eps, eps,
    WIDTH: tl.constexpr, STREAMS: tl.constexpr, MADE: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, ITERATIONS: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [tokens, WIDTH] = Σ pre h, with a NORM normed; with ITERATIONS, a token's second program
    makes post and carry meanwhile."""
    pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK)
        streams = ()  # on their way while the parts are added up
        for s in tl.static_range(STREAMS):
            at = h + (token * STREAMS + s) * WIDTH + column
            streams = streams + (tl.load(at, mask=column < WIDTH, other=0),)
        m = _sums(parts, token, tokens, splits, norm_eps, STREAMS * WIDTH, MADE, COLUMNS, SPLITS)
        total = tl.zeros((BLOCK,), tl.float32)
        for s in tl.static_range(STREAMS):
            pre = _one(m, s, COLUMNS) * tl.load(scale) + tl.load(base + s)
            total += (_sigmoid(pre) + eps) * streams[s].to(tl.float32)
        made = total.to(x.dtype.element_ty)
        if NORM:
            numbers = made.to(tl.float32)
            unit = inverse_rms(tl.sum(numbers * numbers, axis=0), norm_eps, WIDTH)
            factor = tl.load(weight + column, mask=column < WIDTH, other=0)
            made = weighted(numbers * unit, factor, x.dtype.element_ty).to(x.dtype.element_ty)
        tl.store(x + token * WIDTH + column, made, mask=column < WIDTH)
    elif ITERATIONS:
        m = _sums(parts, token, tokens, splits, norm_eps, STREAMS * WIDTH, MADE, COLUMNS, SPLITS)
        for s in tl.static_range(STREAMS):
            to_post = _one(m, STREAMS + s, COLUMNS) * tl.load(scale + 1)
            to_post += tl.load(base + STREAMS + s)
            tl.store(post + token * STREAMS + s, 2 * _sigmoid(to_post))
        logits = ()
        for i in tl.static_range(STREAMS * STREAMS):
            logit = _one(m, 2 * STREAMS + i, COLUMNS) * tl.load(scale + 2)
            logits = logits + (logit + tl.load(base + 2 * STREAMS + i),)
        pairs = _sinkhorn(logits, eps, STREAMS, ITERATIONS)
        for i in tl.static_range(STREAMS * STREAMS):
            tl.store(carry + token * STREAMS * STREAMS + i, pairs[i])


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
