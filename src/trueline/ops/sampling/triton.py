"""Greedy rows, draws without top-k and top-p, and scores of given tokens are kernels; rows that are
edited or narrowed go through torch, on the device too. Asynchronous, except for a
nucleus wider than what is sorted for it at first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from trueline.ops.launch import num_sms, power_of_two
from trueline.ops.sampling import (
    IMPLEMENTATIONS,
    Sampled,
    SamplingRows,
    Scored,
    TokenMask,
    kernels,
)
from trueline.ops.sampling.cpu import leading, retake, score_asked

capabilities = IMPLEMENTATIONS["triton"]

EXACT = {torch.float32: tl.float32, torch.float64: tl.float64}
MASS_CHUNK = 1024
"""Whatever the number of rows: a sum's bits must not depend on the batch."""


MASK_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class SamplingLaunch:
    chunk: int
    tile: int
    warps: int


def launch(num_rows: int, vocab_size: int, sms: int) -> SamplingLaunch:
    """Small chunks while there are too few programs to fill the device."""
    tile = min(power_of_two(vocab_size), 1024)
    chunk = tile
    while chunk < 4 * tile and num_rows * vocab_size >= 16 * sms * chunk:
        chunk *= 2
    return SamplingLaunch(chunk, tile, 4)


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    retaken = {*rows.edited, *rows.narrowed}
    if retaken.issuperset(rows.drawn):
        tokens, bad = draw(logits)
    else:
        tokens, bad = draw(logits, rows.temperature, rows.seed, rows.position, rows.min_p)
    retake(logits, rows, sorted(retaken), tokens, bad)
    if mask := rows.mask and rows.mask.only({*rows.mask.rows} - retaken):
        at = mask.row
        numbers = (rows.temperature[at], rows.seed[at], rows.position[at], rows.min_p[at])
        tokens[at], bad[at] = draw(masked(logits, mask), *numbers)
    tokens.masked_fill_(bad, 0)
    return score_asked(logits, tokens, bad, rows, score)


def draw(
    logits: Tensor,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
    min_p: Tensor | None = None,
    how: SamplingLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B], and which rows are bad: of rows that nothing edits and that have no top-k
    or top-p. Shapes alone decide what is launched, so a graph may hold it. Without a temperature
    all rows are greedy; those whose temperature is 0 are."""
    num_rows, vocab_size = logits.shape
    how = how or launch(num_rows, vocab_size, num_sms(logits.device))
    chunks = -(-vocab_size // how.chunk)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    most = logits.new_empty(num_rows, chunks, dtype=exact)
    ids = logits.new_empty(num_rows, chunks, dtype=torch.int32)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    bad = logits.new_empty(num_rows, dtype=torch.bool)
    if not num_rows:
        return tokens, bad
    given, grid = (logits, *logits.stride()), (num_rows, chunks)
    sizes = {"CHUNK": how.chunk, "TILE": how.tile, "num_warps": how.warps}
    width = power_of_two(chunks)
    kernels.best[grid](*given, most, ids, vocab_size, EXACT[exact], **sizes)
    scores, drawn = most, ids
    if temperature is not None:
        scores, drawn = torch.empty_like(most, dtype=torch.float64), torch.empty_like(ids)
        counters = (temperature, seed, position, min_p)
        kernels.noisy[grid](
            *given, most, *counters, scores, drawn, vocab_size, **sizes, CHUNKS=width
        )
    out, warm = (tokens, bad, chunks), temperature is not None
    kernels.settle[(num_rows,)](
        most, ids, temperature, scores, drawn, *out, DRAWN=warm, CHUNKS=width, num_warps=1
    )
    return tokens, bad


def masked(logits: Tensor, mask: TokenMask) -> Tensor:
    """The mask's rows of the logits: -Inf where a bit is not set, but where the logit is NaN or
    +Inf, which makes its row bad."""
    num_rows, vocab_size = len(mask.row), logits.shape[1]
    out = logits.new_empty(num_rows, vocab_size)
    chunk = min(power_of_two(vocab_size), MASK_CHUNK)
    grid = (num_rows, -(-vocab_size // chunk))
    kernels.masked[grid](
        logits, *logits.stride(), mask.row, mask.words, mask.words.stride(0), out, vocab_size,
        CHUNK=chunk,
    )  # fmt: skip
    return out


def score(logits: Tensor, tokens: Tensor, num_top: int) -> Scored:
    num_rows, vocab_size = logits.shape
    logprobs, totals, ranks, bad = _scores(logits, tokens)
    num_top = min(num_top, vocab_size)
    top_ids = logits.new_empty(num_rows, 0, dtype=torch.int64)
    top_logprobs = logprobs.new_empty(num_rows, 0)
    if num_top and num_rows:
        x = logits.float().masked_fill(bad[:, None], 0.0)
        top_ids = leading(x, num_top)
        found = x.gather(-1, top_ids).double() - totals[:, None]
        top_logprobs = found.float().masked_fill_(bad[:, None], math.nan)
    return Scored(logprobs, ranks, top_ids.masked_fill(bad[:, None], -1), top_logprobs)


def _scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the tokens: logprobs and ranks; of the rows: log of the sum of exp, and which are bad."""
    num_rows, vocab_size = logits.shape
    chunks = -(-vocab_size // MASS_CHUNK)
    most = logits.new_empty(num_rows, chunks, dtype=torch.float32)
    sums = torch.empty_like(most, dtype=torch.float64)
    above = torch.empty_like(most, dtype=torch.int32)
    logprobs = logits.new_empty(num_rows, dtype=torch.float32)
    totals = torch.empty_like(logprobs, dtype=torch.float64)
    ranks = torch.empty_like(logprobs, dtype=torch.int64)
    bad = torch.empty_like(logprobs, dtype=torch.bool)
    if num_rows:
        given, parts = (logits, *logits.stride(), tokens), (most, sums, above)
        kernels.mass[(num_rows, chunks)](*given, *parts, vocab_size, CHUNK=MASS_CHUNK)
        out, width = (totals, logprobs, ranks, bad, chunks), power_of_two(chunks)
        kernels.join[(num_rows,)](*given, *parts, *out, CHUNKS=width, num_warps=1)
    return logprobs, totals, ranks, bad
