# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait


@kernel(do_not_specialize=["tokens"])
def split_gemm(
    x, x_row, weight, out, tokens, hidden, experts, depth,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [splits, tokens, experts]: what `depth` of x's channels give. The weight is the sum of
    PARTS, each of fewer digits, whose products with x are exact."""
    pdl_wait()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(2) * depth
    stop = tl.minimum(start + depth, hidden)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * x_row + inner[None, :]
    at = weight + tl.minimum(n, experts - 1)[:, None] * hidden + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, stop, BLOCK_K):
        inside = (inner < stop - k)[None, :]
        a = tl.load(x_at + k, mask=(m < tokens)[:, None] & inside, other=0)
        a = a.to(weight.dtype.element_ty)
        for part in tl.static_range(PARTS):
            b = tl.load(at + part * experts * hidden + k, mask=inside, other=0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    out += tl.program_id(2).to(tl.int64) * tokens * experts
    to = out + m.to(tl.int64)[:, None] * experts + n[None, :]
    tl.store(to, acc, mask=(m < tokens)[:, None] & (n < experts)[None, :])


@triton.jit
def _ranked(value, index):
    """Whole numbers in the order of `value`, equals by falling index: the largest is the first of
    the best. No two are the same, not even NaN's, nor is any as small as what was taken."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _kept_groups(
    choice, ranked,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIR: tl.constexpr, BLOCK_G: tl.constexpr,
    TAKEN: tl.constexpr,
):  # fmt: skip
    """[BLOCK_G]: the KEPT groups with the largest strength, a group's best or its best two."""
    strength = tl.max(choice, axis=1)
    if PAIR:
        best = tl.max(ranked, axis=1)
        strength += tl.max(tl.where(ranked == best[:, None], float("-inf"), choice), axis=1)
    group = tl.arange(0, BLOCK_G)
    left = tl.where(group < GROUPS, _ranked(strength, group), TAKEN)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.max(left, axis=0)
        kept = kept | (left == best)
        left = tl.where(left == best, TAKEN, left)
    return kept


@triton.jit
def _logits(logits, part, at, real, PARTS: tl.constexpr):
    """The sum of PARTS, in their order."""
    logit = tl.load(logits + at, mask=real, other=float("-inf"))
    for p in tl.static_range(1, PARTS):
        logit += tl.load(logits + p * part + at, mask=real, other=0)
    return logit


@triton.jit
def _score(logit, SCORING: tl.constexpr):
    """Of one expert alone."""
    if SCORING == "sigmoid":
        score = 1 / (1 + tl.exp(-logit))
    else:  # √ log(1 + eˣ); far below zero e^(x / 2), which float32 has where it has no eˣ
        soft = tl.maximum(logit, 0.0) + _log1p(tl.exp(-tl.abs(logit)))
        score = tl.where(logit < -17, tl.exp(logit / 2), tl.sqrt_rn(soft))
    return score


@triton.jit
def _log1p(x):
    """log(1 + x) of 0 ≤ x ≤ 1, to the last digits: 2 artanh(x / (2 + x)). A logarithm of 1 + x has
    lost those of a small x."""
    s = tl.div_rn(x, 2 + x)
    square = s * s
    series = 1.0 / 17
    for k in tl.static_range(7, -1, -1):
        series = series * square + 1.0 / (2 * k + 1)
    return 2 * s * series


@kernel
def choose(
    logits, part, bias, forced, ids, weights, scaling,
    PARTS: tl.constexpr, SCORING: tl.constexpr, BIAS: tl.constexpr, FORCED: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, PAIR: tl.constexpr,
    TOP: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program per token; its experts lie as [groups, size]."""
    pdl_wait()
    TAKEN: tl.constexpr = -(1 << 63)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    expert = group * SIZE + member
    real = (group < GROUPS) & (member < SIZE)
    logits += token * (GROUPS * SIZE)
    logit = _logits(logits, part, expert, real, PARTS)
    if SCORING == "softmax":
        largest = tl.max(tl.max(logit, axis=1), axis=0)
        scores = tl.exp(logit - largest)
        total = tl.sum(tl.sum(scores, axis=1), axis=0)
        scores = scores / total
    else:
        scores = _score(logit, SCORING)
    slot = tl.arange(0, BLOCK_T)
    if FORCED:
        taken = tl.load(forced + token * TOP + slot, mask=slot < TOP, other=0).to(tl.int32)
    else:
        choice = scores
        if BIAS:
            choice += tl.load(bias + expert, mask=real, other=0)
        choice = tl.where(real, choice, float("-inf"))
        left = tl.where(real, _ranked(choice, expert), TAKEN)
        if GROUPS > 1:
            kept = _kept_groups(choice, left, GROUPS, KEPT, PAIR, BLOCK_G, TAKEN)
            left = tl.where(kept[:, None], left, TAKEN)
        taken = tl.zeros((BLOCK_T,), tl.int32)
        for j in tl.static_range(TOP):
            best = tl.max(tl.max(left, axis=1), axis=0)
            left = tl.where(left == best, TAKEN, left)
            taken = tl.where(slot == j, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), taken)
        tl.store(ids + token * TOP + slot, taken, mask=slot < TOP)
    # The scores of the chosen again, from their logits: cheaper than to look for each.
    weight = _logits(logits, part, taken, slot < TOP, PARTS)
    if SCORING == "softmax":
        weight = tl.exp(weight - largest) / total
    else:
        weight = _score(weight, SCORING)
    if RENORMALISE:
        weight = weight / (tl.sum(tl.where(slot < TOP, weight, 0), axis=0) + 1e-20)
    tl.store(weights + token * TOP + slot, weight * scaling, mask=slot < TOP)
